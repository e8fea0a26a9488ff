"""The `env` section: data, completions per prompt, reward, tools, limits."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.schema.curriculum import CurriculumConfig
from config.schema.errors import ConfigError
from config.schema.registry import Registry
from config.schema.values import above_0, at_least, check_fields, is_share, one_of

TOOLS = Registry("env.tools", "envs.tools", "tool")
"""Name of a tool and where it is; those of a user are named module:function or module:Class."""


@dataclass
class DifficultyConfig:
    """Prompts that are too easy or too hard right now are skipped for a while. The defaults skip none."""

    low: float = 0.0
    """Smallest recent success rate of a prompt that is still drawn."""
    high: float = 1.0
    """Largest recent success rate of a prompt that is still drawn."""
    retry_epochs: int = 2
    """A skipped prompt is tried again after this many epochs: the policy has changed since."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                f"env.difficulty: low={self.low}, high={self.high}: success rates, 0 <= low <= high <= 1"
            )
        at_least("env.difficulty.retry_epochs", self.retry_epochs, 1)


@dataclass
class EnvConfig:
    """One dataset (or a weighted mixture) turned into prompts and rewards."""

    dataset: str = MISSING
    """Registered task name, or a task of your own, `module:Class`; `jsonl` reads any local file, `mixture` draws from
    `env.mixture`."""
    data_files: Any = None
    """Local JSONL or parquet file, a list of them, or {split: file}, read instead of the hub."""
    data_revision: str | None = None
    """Commit, tag or branch of the hub's data set. Unset: its newest."""
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
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    num_envs: int = 32
    """Groups (a prompt with its completions) at a time: in grpo.py those of one iteration, in grpo_async.py those that
    each engine has in flight."""
    repeats: int = 16
    """Completions per prompt: the group size G."""
    oversample: int | None = None
    """Candidates generated for a prompt, above `repeats`: of these as many right as wrong ones are kept, where
    there are enough of both. Unset: `repeats`."""
    max_prompt_tokens: int = 512
    """A longer prompt is left out and counted, never cut."""
    system_prompt: str | None = None
    """Replaces the system prompt of the task, its reward or the row's conversation; an empty string removes it."""
    prefill: str | None = None
    """The beginning of every answer, such as `<think>`: a part of the prompt that is judged with the completion. A
    row's column `prefill` takes its place."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options (a generator's ranges, for example)."""
    reward: Any = None
    """What judges in place of the task's own reward: a named reward (docs/rewards.md), a function `module:function`, or
    a list of them, each of which becomes a part by its name."""
    reward_weights: Any = None
    """Weights. With a list of rewards a list as long, such as `[1.0,0.2]`; unset: 1 each. With one reward
    {PART: weight}: the score is then the weighted sum of these parts; unset: the reward's own score."""
    reward_second_opinion: str | None = None
    """A named reward, or a function `module:function`, that is asked only where the reward's own verdict is not
    "right"; if it says "right", that counts (docs/rewards.md). Goes with one reward, not with a list."""
    reward_workers: int | None = None
    """Processes that judge completions. Unset: all cores but one."""
    reward_timeout_s: float = 10.0
    """Wall-clock seconds for one verification; then its worker is killed and the completion is invalid."""
    reward_memory_gib: float = 4.0
    """Address space of a reward worker."""
    max_error_rate: float = 0.1
    """Share of recent verifications that may fail through bad data or a fault in a reward before the run stops."""
    sandbox: str = "auto"
    """How tested programs are isolated: `bubblewrap`, `namespaces` or `rlimits`; `auto`: the first of these
    that works here (docs/sandbox.md says what each protects against). `remote`: the server of `env.sandbox_url` runs
    them."""
    sandbox_url: str | None = None
    """With `env.sandbox=remote`: a server with SandboxFusion's interface, such as `http://HOST:8080`."""
    max_steps: int = 1
    """Turns, not training steps: how often the model writes in one completion. Above 1 the environment replies between
    them (docs/turns.md), and `inference_model.max_tokens` bounds all turns and replies together."""
    reasoning: bool = False
    """The environment asks the model to think again after every turn that calls no tool."""
    reasoning_prompt: str = (
        "Think again: check your answer, then give the final one in the form you were asked for."
    )
    """How it asks."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model is told of and may call at the end of a turn: `calculator`, `python` (in the sandbox), and
    your own, `module:function` (docs/turns.md)."""
    tool_timeout_s: float = 10.0
    """Seconds for one call of a tool of your own; then the model is told that it took too long."""
    samples: str | None = None
    """For `run=rewards`: JSONL of {"row": index in the data file, "completion": text}."""

    def __post_init__(self) -> None:
        at_least("env.reward_workers", self.reward_workers, 1)
        at_least("env.max_prompt_tokens", self.max_prompt_tokens, 1)
        one_of("env.duplicates", self.duplicates, ("keep", "first", "drop"))
        one_of("env.sandbox", self.sandbox, ("auto", "bubblewrap", "namespaces", "rlimits", "remote"))
        url = self.sandbox_url
        if self.sandbox != "remote" and url is not None:
            raise ConfigError(
                f"env.sandbox_url={url}: nothing asks it at env.sandbox={self.sandbox}; add env.sandbox=remote"
            )
        if self.sandbox == "remote" and not (url or "").startswith(("http://", "https://")):
            raise ConfigError(
                f"env.sandbox_url={url}: env.sandbox=remote needs the address of a server, http://HOST:PORT"
            )
        check_fields("env", self, ("holdout",), lambda value: 0 <= value < 1, "a share, 0 to below 1")
        seconds_and_bytes = ("reward_timeout_s", "reward_memory_gib", "tool_timeout_s")
        check_fields("env", self, seconds_and_bytes, above_0, "must be above 0")
        check_fields("env", self, ("max_error_rate",), is_share, "a share, 0 to 1")
        passes_over = self.difficulty.low > 0 or self.difficulty.high < 1
        self.curriculum.check_against(self.dataset, self.mixture, passes_over)
        self._check_rewards()
        unknown = [tool for tool in self.tools if tool not in TOOLS.names and ":" not in tool]
        if unknown:
            raise ConfigError(
                f"env.tools={unknown}: choose from {', '.join(TOOLS.names)}; one of your own is named module:function"
            )
        replies = self.reasoning or self.tools
        at_least("env.max_steps", self.max_steps, 1)
        if self.max_steps > 1 and not replies:
            raise ConfigError(
                f"env.max_steps={self.max_steps}: nothing replies between turns; set env.reasoning=true or "
                "env.tools=[calculator], or leave env.max_steps at 1"
            )
        if self.max_steps == 1 and replies:
            raise ConfigError(
                f"env.reasoning={self.reasoning}, env.tools={self.tools}: a reply needs a second turn; set "
                "env.max_steps=2 or more"
            )

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
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            for value in values
        ):
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
        second = self.reward_second_opinion
        if second == "":
            raise ConfigError("env.reward_second_opinion='': give the name of a reward, or null for none")
        if second and isinstance(reward, list):
            raise ConfigError(
                f"env.reward_second_opinion={second} with the list env.reward={reward!r}: which of their verdicts "
                "it would replace is not defined; name one reward"
            )
        if second and second == reward:
            raise ConfigError(
                f"env.reward_second_opinion={second} is env.reward itself; name another reward, or null for none"
            )

    @property
    def candidates(self) -> int:
        """Completions generated for a prompt."""
        return self.oversample or self.repeats
