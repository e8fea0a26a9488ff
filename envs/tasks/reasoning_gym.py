"""Task `reasoning_gym`: generated puzzles, scored by the library's scorers and `puzzle_rules`."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, Reward, Task, register
from envs.tasks.puzzle_rules import can_be_scored, deserves_full_score
from envs.verifiers.extract import answer_in_tags, text_after_thinking
from envs.verifiers.rules import RULES

TASK_OPTIONS = ("name", "num_rows", "seed")
NUM_ROWS = 10_000
TEST_SHARE = 10
"""Ratio of the rows of the training split to the rows of the test split."""
COMPOSITE = "composite"
"""Name of the generator that samples from other generators."""
TEST_SEED = 1_000_003
"""Offset of the test split's seed; puzzles of the training split are removed from the test split."""


@register("reasoning_gym")
class ReasoningGym(Task):
    """Task with the library's score (0 to 1) of the text in `<answer>` as reward.

    Options: `name` (the generator), `num_rows` of the training split, `seed`; the generator gets all other options.
    `composite` samples from several generators: `datasets` is a list of {name: GENERATOR, weight: NUMBER, config:
    {OPTION: VALUE}}. Columns for a curriculum: the numbers and texts in the generator's metadata, such as `num_terms`
    of `chain_sum`.
    """

    reads_files = False
    reads_hub = False

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.system_prompt = RULES["think_answer_tags"].system_prompt
        self.weights = {"accuracy": 1.0, "format": 0.0}
        self.generator = str(env.options.get("name"))
        self.settings = {key: value for key, value in env.options.items() if key not in TASK_OPTIONS}
        known = _generators()
        if self.generator not in known:
            raise ConfigError(
                f"env.options.name={self.generator!r}: not a generator of reasoning-gym; choose one of "
                f"{', '.join(known)}"
            )

    def examples(self, split: str) -> Sequence[Example]:
        if split not in ("train", "test"):
            raise ConfigError(f"env.split={split!r}: the reasoning_gym task has the splits train and test only")
        rows = int(self.env.options.get("num_rows", NUM_ROWS))
        seed = int(self.env.options.get("seed", 0))
        entries = self._generate(rows, seed)
        if split == "test":
            train_questions = {entry["question"] for entry in entries}
            test_entries = self._generate(max(1, rows // TEST_SHARE), seed + TEST_SEED)
            entries = [entry for entry in test_entries if entry["question"] not in train_questions]
        if not entries:
            raise ConfigError(
                f"env.options.name={self.generator}: every test puzzle is a training puzzle too; lower "
                f"env.options.num_rows={rows} or widen the generator's options"
            )
        return [self._example(index, entry) for index, entry in enumerate(entries)]

    def _generate(self, rows: int, seed: int) -> list[dict[str, Any]]:
        try:
            return list(_make_dataset(self.generator, self.settings, rows, seed))
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"env.options.name={self.generator}: {error}") from error

    def _example(self, index: int, entry: dict[str, Any]) -> Example:
        metadata = entry["metadata"].items()
        columns = {key: value for key, value in metadata if isinstance(value, int | float | str)}
        return Example(
            self.messages(entry["question"].strip()), entry, index, row_data=self.curriculum_columns(columns)
        )

    def reward(self, completion: Completion, example: Example) -> Reward:
        answer_text = answer_in_tags(text_after_thinking(completion.full_text) or "")
        if not answer_text:
            return Reward(0.0, {"accuracy": 0.0, "format": 0.0})
        generator = self.generator
        if generator == COMPOSITE:
            generator = example.answer["metadata"]["source_dataset"]
        scorer = _scorer(self.generator, json.dumps(self.settings))
        answer = example.answer["answer"]
        if not can_be_scored(generator, answer_text, example.answer):
            return Reward(0.0, {"accuracy": 0.0, "format": 1.0})
        try:
            score = float(scorer(answer_text, example.answer))
        except Exception:
            if answer is not None and float(scorer(answer, example.answer)) < 1.0:
                raise
            return Reward(0.0, {"accuracy": 0.0, "format": 1.0}, outcome="invalid")
        if score >= 1.0:
            score = float(deserves_full_score(generator, answer_text, example.answer))
        return Reward(score, {"accuracy": score, "format": 1.0})

    def warm_up(self) -> None:
        _scorer(self.generator, json.dumps(self.settings))


def _make_dataset(generator: str, settings: dict[str, Any], rows: int, seed: int) -> Any:
    """Makes a data set of the library.

    Raises:
        TypeError, ValueError, AssertionError: the generator refuses the settings.
    """
    import reasoning_gym

    if generator == COMPOSITE:
        settings = {**settings, "datasets": _dataset_specs(settings.get("datasets"))}
    return reasoning_gym.create_dataset(generator, size=rows, seed=seed, **settings)


@functools.cache
def _scorer(generator: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    """Returns the scorer of a generator, cached per process since some scorers load dictionaries.

    settings: the generator's settings as JSON; some scorers check whether numbers are in range.
    """
    score: Callable[[str, dict[str, Any]], float] = _make_dataset(generator, json.loads(settings), 1, 0).score_answer
    return score


def _dataset_specs(datasets: Any) -> list[Any]:
    """Returns the specifications of the generators of `composite`. Raises ValueError for wrong settings."""
    from reasoning_gym.composite import DatasetSpec

    known = _generators()
    form = "[{name: GENERATOR, weight: NUMBER, config: {OPTION: VALUE}}, ...]"
    if not isinstance(datasets, list) or not datasets or not all(isinstance(each, dict) for each in datasets):
        raise ValueError(f"datasets={datasets!r}: write env.options.datasets={form}")
    for each in datasets:
        if each.get("name") not in known or not each.keys() <= {"name", "weight", "config"}:
            raise ValueError(f"datasets: {each!r} is not of the form {form}, with a generator of reasoning-gym")
    settings = [(each["name"], each.get("weight", 1), each.get("config", {})) for each in datasets]
    return [DatasetSpec(name, float(weight), dict(config)) for name, weight, config in settings]


def _generators() -> list[str]:
    """Returns the names of all generators. Raises ConfigError if the library is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "env.dataset=reasoning_gym needs the library: pip install -e '.[reasoning_gym]' in the project's folder"
        ) from error
    return sorted(DATASETS)
