"""Tests of the repetition metrics against hand-computed numbers."""

from envs.example import Example
from envs.group import Group, GroupTimes, SampledCompletion, Sampling
from torchgrpo.monitoring.repetition import PROMPT_WINDOW, Repetition, contains_question


def make_group(
    question: str, texts: list[str], temperature: float = 1.0, unselected_texts: tuple[str, ...] = ()
) -> Group:
    def completion(text: str) -> SampledCompletion:
        return SampledCompletion([1], [0.0], [0], "stop", text=text)

    example = Example(({"role": "user", "content": question},), "", 0)
    completions = [completion(text) for text in texts]
    candidates = [completion(text) for text in unselected_texts]
    times = GroupTimes(0.0, 0.0, 0.0)
    return Group(0, example, (1,), question, Sampling(temperature), completions, times, candidates)


def test_duplicates_are_counted_within_a_group() -> None:
    metrics = Repetition().metrics([make_group("first", ["a", "a", "b", "b", "b"]), make_group("second", ["a", "b"])])
    assert metrics["groups/duplicates"] == (3 / 4 + 0) / 2


def test_unselected_candidates_count_and_greedy_groups_do_not() -> None:
    one = make_group("first", ["a", "a"], unselected_texts=("a", "a"))
    assert Repetition().metrics([one])["groups/duplicates"] == 1.0
    assert Repetition().metrics([make_group("first", ["a", "a"], temperature=0.0)])["groups/duplicates"] == 0.0
    assert Repetition().metrics([make_group("first", ["a"])])["groups/duplicates"] == 0.0


def test_prompt_echo_ignores_whitespace_and_case() -> None:
    texts = ["What is 7+5? It is 12", "what is\n 7 + 5?", "12", "What is 7+6?"]
    assert Repetition().metrics([make_group("What is 7+5?", texts)])["completions/prompt_echo"] == 0.5
    assert not contains_question("12+34=", "12 + 34 = 46")  # too short to count as an echo
    assert contains_question("1200 + 340 =", "1200+340=")


def test_prompts_in_a_batch_and_over_batches() -> None:
    repetition = Repetition()
    metrics = repetition.metrics([make_group(name, ["a"]) for name in ("one", "two", "one", "one")])
    assert metrics["prompts/duplicates"] == 0.5 and metrics["prompts/max_repeat_ratio"] == 3 / (4 / 2)
    metrics = repetition.metrics([make_group("three", ["a"])])
    assert metrics["prompts/duplicates"] == 0.0 and metrics["prompts/max_repeat_ratio"] == 9 / 5


def test_resumed_run_continues_the_counts() -> None:
    uninterrupted, resumed = Repetition(), Repetition()
    uninterrupted.metrics([make_group(name, ["a"]) for name in ("one", "two", "one")])
    resumed.load(uninterrupted.state())
    batch = [make_group(name, ["a"]) for name in ("one", "three")]
    ratios = [each.metrics(batch)["prompts/max_repeat_ratio"] for each in (resumed, uninterrupted)]
    assert ratios == [9 / 5, 9 / 5]


def test_the_oldest_prompts_are_forgotten() -> None:
    repetition = Repetition()
    repetition.metrics([make_group("often", ["a"])] * 50)
    for number in range(PROMPT_WINDOW):
        metrics = repetition.metrics([make_group(str(number), ["a"])])
    assert metrics["prompts/max_repeat_ratio"] == 1.0
