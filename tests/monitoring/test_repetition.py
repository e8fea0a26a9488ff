"""What groups repeat, against numbers counted by hand."""

from envs.example import Example
from envs.group import Group, SampledCompletion, Sampling, Times
from torchgrpo.monitoring.repetition import REMEMBERED, Repetition, holds_question


def group(question: str, texts: list[str], temperature: float = 1.0, left_out: tuple[str, ...] = ()) -> Group:
    def completion(text: str) -> SampledCompletion:
        return SampledCompletion([1], [0.0], [0], "stop", text=text)

    example = Example(({"role": "user", "content": question},), "", 0)
    made = [completion(text) for text in texts]
    others = [completion(text) for text in left_out]
    return Group(0, example, (1,), question, Sampling(temperature), made, Times(0.0, 0.0, 0.0), others)


def test_duplicates_are_counted_within_a_group() -> None:
    found = Repetition().metrics([group("first", ["a", "a", "b", "b", "b"]), group("second", ["a", "b"])])
    assert found["groups/duplicates"] == (3 / 4 + 0) / 2


def test_candidates_left_out_count_and_greedy_groups_do_not() -> None:
    one = group("first", ["a", "a"], left_out=("a", "a"))
    assert Repetition().metrics([one])["groups/duplicates"] == 1.0
    assert Repetition().metrics([group("first", ["a", "a"], temperature=0.0)])["groups/duplicates"] == 0.0
    assert Repetition().metrics([group("first", ["a"])])["groups/duplicates"] == 0.0


def test_a_question_in_an_answer_whatever_its_blanks_and_capitals() -> None:
    texts = ["What is 7+5? It is 12", "what is\n 7 + 5?", "12", "What is 7+6?"]
    assert Repetition().metrics([group("What is 7+5?", texts)])["groups/repeats_question"] == 0.5
    assert not holds_question("12+34=", "12 + 34 = 46")  # so short that it may stand there by right
    assert holds_question("1200 + 340 =", "1200+340=")


def test_prompts_in_a_batch_and_over_batches() -> None:
    counts = Repetition()
    found = counts.metrics([group(name, ["a"]) for name in ("one", "two", "one", "one")])
    assert found["prompts/repeated"] == 0.5 and found["prompts/most_drawn"] == 3 / (4 / 2)
    found = counts.metrics([group("three", ["a"])])
    assert found["prompts/repeated"] == 0.0 and found["prompts/most_drawn"] == 9 / 5


def test_a_resumed_run_goes_on_counting() -> None:
    whole, resumed = Repetition(), Repetition()
    whole.metrics([group(name, ["a"]) for name in ("one", "two", "one")])
    resumed.load(whole.state())
    batch = [group(name, ["a"]) for name in ("one", "three")]
    assert resumed.metrics(batch)["prompts/most_drawn"] == whole.metrics(batch)["prompts/most_drawn"] == 9 / 5


def test_the_oldest_prompts_are_forgotten() -> None:
    counts = Repetition()
    counts.metrics([group("often", ["a"])] * 50)
    for number in range(REMEMBERED):
        found = counts.metrics([group(str(number), ["a"])])
    assert found["prompts/most_drawn"] == 1.0
