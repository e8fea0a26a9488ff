"""Puzzles that the reasoning-gym library generates, judged by the library's own scorers and `puzzle_rules`."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.task import Completion, Example, Reward, Task, register
from envs.tasks.puzzle_rules import deserves_full_marks, may_be_scored
from envs.verifiers.extract import after_thinking, tagged
from envs.verifiers.rules import RULES

OWN_OPTIONS = ("name", "num_rows", "seed")
NUM_ROWS = 10_000
TEST_SHARE = 10
"""The test split has a tenth as many rows as the training split."""
COMPOSITE = "composite"
"""The generator that draws from others."""
TEST_SEED = 1_000_003
"""Added to the seed for the test split; puzzles that the training split has too are left out of it."""


@register("reasoning_gym")
class ReasoningGym(Task):
    """Puzzles of reasoning-gym; the reward is the scorer's (0 to 1) for the text in `<answer>`.

    Options: `name` (the generator), `num_rows` of the training split, `seed`; all others go to the generator.
    `composite` draws from several: `datasets` is a list of {name: GENERATOR, weight: NUMBER, config: {its options}}.
    Columns for a curriculum: the numbers and texts of the generator's metadata, as `num_terms` of `chain_sum`.
    """

    reads_files = False
    reads_hub = False

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.system_prompt = RULES["think_answer_tags"].system_prompt
        self.weights = {"accuracy": 1.0, "format": 0.0}
        self.generator = str(env.options.get("name"))
        self.settings = {key: value for key, value in env.options.items() if key not in OWN_OPTIONS}
        known = _generators()
        if self.generator not in known:
            raise ConfigError(
                f"env.options.name={self.generator!r}: not a generator of reasoning-gym; known: {', '.join(known)}"
            )

    def examples(self, split: str) -> Sequence[Example]:
        if split not in ("train", "test"):
            raise ConfigError(f"env.split={split!r}: the reasoning_gym task has train and test")
        rows = int(self.env.options.get("num_rows", NUM_ROWS))
        seed = int(self.env.options.get("seed", 0))
        entries = self._generate(rows, seed)
        if split == "test":
            trained = {entry["question"] for entry in entries}
            held_out = self._generate(max(1, rows // TEST_SHARE), seed + TEST_SEED)
            entries = [entry for entry in held_out if entry["question"] not in trained]
        if not entries:
            raise ConfigError(
                f"env.options.name={self.generator}: every test puzzle is a training puzzle too; lower "
                f"env.options.num_rows={rows} or widen the generator's options"
            )
        return [self._example(index, entry) for index, entry in enumerate(entries)]

    def _generate(self, rows: int, seed: int) -> list[dict[str, Any]]:
        try:
            return list(_made(self.generator, self.settings, rows, seed))
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"env.options of reasoning_gym name={self.generator}: {error}") from error

    def _example(self, index: int, entry: dict[str, Any]) -> Example:
        metadata = entry["metadata"].items()
        columns = {key: value for key, value in metadata if isinstance(value, int | float | str)}
        return Example(self.messages(entry["question"].strip()), entry, index, row_data=self.kept(columns))

    def reward(self, completion: Completion, example: Example) -> Reward:
        given = tagged(after_thinking(completion.full_text) or "")
        if not given:
            return Reward(0.0, {"accuracy": 0.0, "format": 0.0})
        generator = self.generator
        if generator == COMPOSITE:
            generator = example.answer["metadata"]["source_dataset"]
        scorer = _scorer(self.generator, json.dumps(self.settings))
        answer = example.answer["answer"]
        if not may_be_scored(generator, given, example.answer):
            return Reward(0.0, {"accuracy": 0.0, "format": 1.0})
        try:
            score = float(scorer(given, example.answer))
        except Exception:
            if answer is not None and float(scorer(answer, example.answer)) < 1.0:
                raise
            return Reward(0.0, {"accuracy": 0.0, "format": 1.0}, outcome="invalid")
        if score >= 1.0:
            score = float(deserves_full_marks(generator, given, example.answer))
        return Reward(score, {"accuracy": score, "format": 1.0})

    def warm_up(self) -> None:
        _scorer(self.generator, json.dumps(self.settings))


def _made(generator: str, settings: dict[str, Any], rows: int, seed: int) -> Any:
    """The library's data set.

    Raises:
        TypeError, ValueError, AssertionError: settings that the generator does not take.
    """
    import reasoning_gym

    if generator == COMPOSITE:
        settings = {**settings, "datasets": _specifications(settings.get("datasets"))}
    return reasoning_gym.create_dataset(generator, size=rows, seed=seed, **settings)


@functools.cache
def _scorer(generator: str, settings: str) -> Callable[[str, dict[str, Any]], float]:
    """Once a process, for some read dictionaries; with the settings, for some scorers ask whether numbers are in range.

    settings: JSON.
    """
    score: Callable[[str, dict[str, Any]], float] = _made(generator, json.loads(settings), 1, 0).score_answer
    return score


def _specifications(given: Any) -> list[Any]:
    """The generators that `composite` draws from. Raises ValueError for other than a list of them."""
    from reasoning_gym.composite import DatasetSpec

    known = _generators()
    form = "[{name: GENERATOR, weight: NUMBER, config: {OPTION: VALUE}}, ...]"
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise ValueError(f"datasets={given!r}: write env.options.datasets={form}")
    for each in given:
        if each.get("name") not in known or not each.keys() <= {"name", "weight", "config"}:
            raise ValueError(
                f"datasets: {each!r} is not of the form {form}, with a generator of reasoning-gym"
            )
    settings = [(each["name"], each.get("weight", 1), each.get("config", {})) for each in given]
    return [DatasetSpec(name, float(weight), dict(config)) for name, weight, config in settings]


def _generators() -> list[str]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "env.dataset=reasoning_gym needs the library: pip install -e '.[reasoning_gym]' in the project's folder"
        ) from error
    return sorted(DATASETS)
