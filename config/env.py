"""The `env` section: which prompts, how many completions, which reward, which limits."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.errors import ConfigError

DUPLICATES = ("keep", "first", "drop")
TOOLS = {"calculator": "envs.tools.calculator:calculator", "python": "envs.tools.python:PythonTool"}
"""Name of a tool and where it is; those of a user are named module:function or module:Class."""
SANDBOXES = ("auto", "bubblewrap", "namespaces", "rlimits")


@dataclass
class DifficultyConfig:
    """Prompts that are too easy or too hard right now are skipped for a while. The defaults skip none."""

    low: float = 0.0
    """Smallest recent success rate of a prompt that is still drawn."""
    high: float = 1.0
    """Largest one."""
    retry_epochs: int = 2
    """A skipped prompt is tried again after this many epochs: the policy has changed since."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                f"env.difficulty: low={self.low}, high={self.high}: success rates, 0 <= low <= high <= 1"
            )
        if self.retry_epochs < 1:
            raise ConfigError(f"env.difficulty.retry_epochs={self.retry_epochs}: must be at least 1")


@dataclass
class EnvConfig:
    """One dataset (or a weighted mixture) turned into prompts and rewards."""

    dataset: str = MISSING
    """Registered task name, or a task of your own, `module:Class`; `jsonl` reads any local file, `mixture` draws from
    `env.mixture`."""
    data_files: Any = None
    """Local JSONL or parquet file, a list of them, or {split: file}, read instead of the hub."""
    split: str = "train"
    """Which part of the data set the prompts come from."""
    holdout: float = 0.0
    """Share of the rows, chosen by a hash of the prompt, that is `test` and not `train`; for data without a
    test split of its own."""
    duplicates: str = "keep"
    """Rows with the same prompt: `keep` all, the `first` one only, or `drop` those whose answers contradict
    each other and keep the first of the others. They are reported either way."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """For `dataset=mixture`: NAME: WEIGHT, or NAME: {weight, dataset, data_files, options, reward, ...}."""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    num_envs: int = 32
    """Groups that are generated at a time: those of one iteration of grpo.py, those that each engine has in
    flight in grpo_async.py."""
    repeats: int = 16
    """Completions per prompt: the group size G."""
    oversample: int | None = None
    """Candidates generated for a prompt, above `repeats`: of these as many right as wrong ones are kept, where
    there are enough of both. Unset: `repeats`."""
    max_prompt_tokens: int = 512
    """A longer prompt is left out and counted, never cut."""
    system_prompt: str | None = None
    """Replaces the system prompt of the task or its reward; an empty string removes it."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options (a generator's ranges, for example)."""
    reward: Any = None
    """Judge in place of the task's own: a named reward (docs/rewards.md) or a function, `module:function`; or a list of
    them, of which each becomes a part by its name."""
    reward_weights: Any = None
    """For a list of rewards, what each counts, such as `[1.0,0.2]`; unset: 1. Else PART: weight; the score is then the
    weighted sum of these parts of the reward. Unset: its own score."""
    reward_workers: int | None = None
    """Processes that judge completions. Unset: all cores but one."""
    reward_timeout_s: float = 10.0
    """Wall-clock seconds for one verification; then its worker is killed and the completion is invalid."""
    reward_memory_gib: float = 4.0
    """Address space of a reward worker."""
    max_error_rate: float = 0.1
    """Share of recent verifications that may fail by our own or the data's fault before the run stops."""
    sandbox: str = "auto"
    """How programs under test are shut in: `bubblewrap`, `namespaces` or `rlimits`; `auto`: the first of these
    that works here (docs/sandbox.md says what each protects against)."""
    max_steps: int = 1
    """Turns of the model in one completion. Above 1 the environment answers between them (docs/turns.md), and
    `inference_model.max_tokens` bounds all turns and answers together."""
    reasoning: bool = False
    """The environment asks the model to think again after every turn that no tool answers."""
    reasoning_prompt: str = (
        "Think again: check your answer, then give the final one in the form you were asked for."
    )
    """What it says then."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model is told of and may call at the end of a turn: `calculator`, `python` (in the sandbox), and
    your own, `module:function` (docs/turns.md)."""
    tool_timeout_s: float = 10.0
    """Seconds for one call of a tool of your own; then the model is told that it took too long."""
    samples: str | None = None
    """For `run=rewards`: JSONL of {"row": index in the data file, "completion": text}."""

    def __post_init__(self) -> None:
        if self.reward_workers is not None and self.reward_workers < 1:
            raise ConfigError(f"env.reward_workers={self.reward_workers}: must be at least 1")
        if self.duplicates not in DUPLICATES:
            raise ConfigError(f"env.duplicates={self.duplicates!r}: choose one of {', '.join(DUPLICATES)}")
        if self.sandbox not in SANDBOXES:
            raise ConfigError(f"env.sandbox={self.sandbox!r}: choose one of {', '.join(SANDBOXES)}")
        if not 0.0 <= self.holdout < 1.0:
            raise ConfigError(f"env.holdout={self.holdout}: a share, 0 to below 1")
        for key in ("reward_timeout_s", "reward_memory_gib", "tool_timeout_s"):
            if not vars(self)[key] > 0:
                raise ConfigError(f"env.{key}={vars(self)[key]}: must be above 0")
        if not 0.0 <= self.max_error_rate <= 1.0:
            raise ConfigError(f"env.max_error_rate={self.max_error_rate}: a share, 0 to 1")
        self._check_rewards()
        self._check_turns()

    def _check_rewards(self) -> None:
        reward, weights = self.reward, self.reward_weights
        names = reward if isinstance(reward, list) else [] if reward is None else [reward]
        if reward == [] or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"env.reward={reward!r}: give the name of a reward, or a list of names")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"env.reward: {twice[0]} is there twice; name it once, with a weight of its own"
            )
        values = list(weights.values()) if isinstance(weights, dict) else [] if weights is None else weights
        if not isinstance(values, list) or not all(_is_number(value) for value in values):
            raise ConfigError(
                f"env.reward_weights={weights!r}: finite numbers, {{PART: weight}} or, for a list of rewards, a list"
            )
        if isinstance(weights, list) and (not isinstance(reward, list) or len(weights) != len(reward)):
            raise ConfigError(
                f"env.reward_weights={weights!r} has {len(weights)} weights for env.reward={reward!r}: a list of "
                "weights goes with a list of as many rewards"
            )
        if isinstance(reward, list) and isinstance(weights, dict) and weights:
            example = f"[{','.join(['1.0'] * len(reward))}]"
            raise ConfigError(
                f"env.reward_weights={weights!r} names parts of one reward, but env.reward is a list: give a weight "
                f"for each in their order, such as env.reward_weights={example}"
            )

    def _check_turns(self) -> None:
        unknown = [tool for tool in self.tools if tool not in TOOLS and ":" not in tool]
        if unknown:
            raise ConfigError(
                f"env.tools={unknown}: choose from {', '.join(TOOLS)}; one of your own is named module:function"
            )
        answered = self.reasoning or self.tools
        if self.max_steps < 1:
            raise ConfigError(f"env.max_steps={self.max_steps}: must be at least 1")
        if self.max_steps > 1 and not answered:
            raise ConfigError(
                f"env.max_steps={self.max_steps}: nothing answers between turns; set env.reasoning=true or "
                "env.tools=[calculator], or leave env.max_steps at 1"
            )
        if self.max_steps == 1 and answered:
            raise ConfigError(
                f"env.reasoning={self.reasoning}, env.tools={self.tools}: an answer needs a second turn; set "
                "env.max_steps=2 or more"
            )

    @property
    def candidates(self) -> int:
        """Completions generated for a prompt."""
        return self.oversample or self.repeats


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
