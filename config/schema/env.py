"""The `env` section: data, group size, rewards, reward workers, sandbox, turns, tools and environment."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from config.schema.agent import DEFAULT_AGENT_TURNS, check_agent
from config.schema.curriculum import CurriculumConfig
from config.schema.errors import ConfigError
from config.schema.model_rewards import MODEL_REWARDS, JudgeConfig, RewardModelConfig
from config.schema.registry import Registry
from config.schema.values import check_choice, check_fields, check_minimum, is_positive, is_share

TOOLS = Registry("env.tools", "envs.tools.builtin", "tool")
"""Names of the built-in tools; a user's tool is `module:function` or `module:Class`."""
TOOL_FORMATS = ("native", "tags")
MIN_RESULT_CHARACTERS = 100
"""Smallest `env.tool_result_characters`, which has room for the note on a cut."""
ENVIRONMENTS = Registry("env.environment", "envs.environments.builtin", "environment")
"""Names of the built-in environments; a user's environment is `module:Class` or `module:function`."""
ENVIRONMENT_PROMPTS = "environment"
"""Value of `env.dataset` for the prompts of the environment itself."""
DEFAULT_ENVIRONMENT_TURNS = 16


@dataclass
class DifficultyConfig:
    """Skips prompts that are too easy or too hard for the present policy.

    The defaults skip no prompt.
    """

    low: float = 0.0
    """Minimum recent success rate of a prompt to sample."""
    high: float = 1.0
    """Maximum recent success rate of a prompt to sample."""
    retry_epochs: int = 2
    """Epochs after which a skipped prompt is sampled again, since the policy has changed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                f"env.difficulty: low={self.low}, high={self.high}: must be success rates with 0 <= low <= high <= 1"
            )
        check_minimum("env.difficulty.retry_epochs", self.retry_epochs, 1)


@dataclass
class EnvConfig:
    """A data set (or a weighted mixture), its prompts and its rewards."""

    dataset: str = MISSING
    """Registered task name, or a task of your own, `module:Class`; `jsonl` reads any local file, `mixture`
    samples from `env.mixture`."""
    data_files: Any = None
    """Local JSONL or parquet file, a list of files, or {split: file}, read instead of the data set on the hub."""
    data_revision: str | None = None
    """Commit, tag or branch of the data set on the hub. Unset: the newest revision."""
    split: str = "train"
    """Split of the data set that the prompts come from."""
    holdout: float = 0.0
    """Share of the rows, chosen by a hash of the prompt, that become `test` instead of `train`; for data
    without a test split."""
    duplicates: str = "keep"
    """Rows with the same prompt: `keep` keeps all, `first` keeps only the first row, `drop` removes rows with
    contradictory answers and keeps the first of the others. Duplicates are reported in all cases."""
    mixture: dict[str, Any] = field(default_factory=dict)
    """Members of `dataset=mixture`: NAME: WEIGHT, or NAME: {weight, dataset, data_files, options, reward, ...}."""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    num_envs: int = 32
    """Number of groups (a prompt with its completions): in grpo.py the groups of an iteration, in grpo_async.py
    the groups that each engine has in flight."""
    repeats: int = 16
    """Completions per prompt: the group size G."""
    oversample: int | None = None
    """Number of candidate completions generated for a prompt, more than `repeats`. Equal numbers of right and
    wrong completions are kept, where there are enough of both. Unset: `repeats`."""
    max_prompt_tokens: int = 512
    """Maximum prompt length in tokens. Longer prompts are skipped and counted, never truncated."""
    system_prompt: str | None = None
    """Replaces the system prompt of the task, of its reward or of the row's conversation; an empty string
    removes it."""
    prefill: str | None = None
    """Text at the start of every answer, such as `<think>`: it belongs to the prompt, and is scored together
    with the completion. A column `prefill` of a row overrides it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, such as the ranges of a generator."""
    reward: Any = None
    """The reward in place of the task's own: a named reward (docs/rewards.md), a function `module:function`, `judge`
    or `reward_model`. In a list of rewards each becomes a reward component of its name."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_weights: Any = None
    """Weights of reward components. For a list of rewards: a list of equal length, such as `[1.0,0.2]`; unset:
    1 each. For a single reward: {COMPONENT: weight}, and the score is the weighted sum of these components; unset:
    the reward's own score."""
    fallback_reward: str | None = None
    """A named reward, or a function `module:function`, that is called only where the outcome of `env.reward` is
    not "right"; its outcome "right" replaces that outcome (docs/rewards.md). Works with a single reward, not
    with a list."""
    group_reward: str | None = None
    """A function `module:function` of all completions of a prompt, for rankers and pairwise judges. Its numbers
    replace the scores of `env.reward` in training (docs/rewards.md); evaluations keep the scores of `env.reward`."""
    reward_workers: int | None = None
    """Number of processes that score completions. Unset: all cores but one."""
    reward_timeout_s: float = 10.0
    """Maximum wall-clock seconds to score one completion; then the worker is killed and the completion is
    invalid."""
    reward_memory_gib: float = 4.0
    """Maximum address space of a reward worker, and of a worker of the environment, in GiB."""
    max_error_rate: float = 0.1
    """Maximum share of recently scored completions that fail through bad data or a bug in a reward; beyond it,
    the run stops."""
    sandbox: str = "auto"
    """Isolation of tested programs: `bubblewrap`, `namespaces` or `rlimits`; `auto` uses the first of these
    that works on this machine. `remote` runs programs on the server `env.sandbox_url`. docs/sandbox.md
    describes the protection of each."""
    sandbox_url: str | None = None
    """Server with SandboxFusion's interface for `env.sandbox=remote`, such as `http://HOST:8080`."""
    environment: str | None = None
    """Environment that replies to every turn of the model: a built-in name, or your own class or function,
    `module:Class` or `module:function` (docs/environments.md). Unset: the tools and `reasoning` reply."""
    environment_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class, or of its function after the first two parameters."""
    environment_workers: int | None = None
    """Number of processes that run the environments. Unset: the process of the run, where `async` methods run in the
    event loop and others in threads. Set it for environments that compute long."""
    agent: str | None = None
    """Program that plays an episode through an OpenAI-compatible server of the run: a command line, or a function of
    your own, `module:function`. Excludes `environment`, `tools` and `reasoning`."""
    agent_env: dict[str, Any] = field(default_factory=dict)
    """Further environment variables of the agent, NAME: value; null for the value in the run. An agent gets few
    variables of the run, and no keys or tokens."""
    agent_columns: list[str] = field(default_factory=list)
    """Columns of the data row that the agent may read besides the messages."""
    step_timeout_s: float = 60.0
    """Maximum seconds of one call of the environment. Then its episode ends as an error."""
    episode_timeout_s: float = 600.0
    """Maximum seconds of an episode with its environment or agent. Then the episode ends."""
    episodes: int | None = None
    """Maximum number of unfinished episodes of one engine. Unset: those of all groups in flight; with `env.agent`, four
    for each CPU core in the whole run."""
    turn_tokens: int | None = None
    """Maximum number of tokens that the model samples in one turn. Unset: the rest of the episode's tokens."""
    max_episode_tokens: int | None = None
    """Maximum number of tokens of an episode after its prompt, with all replies. Unset:
    `inference_model.max_tokens`."""
    turn_ends: list[str] = field(default_factory=list)
    """Texts that end a turn, such as `[</search>]`: sampled tokens after such a text are cut off."""
    history: str = "template"
    """Messages that the model reads in later turns. `template`: as the chat template renders them; a template that
    rewrites earlier turns begins a new sequence. `append`: earlier turns stay as sampled."""
    max_steps: int | None = None
    """Maximum number of turns of the model in one completion, not of training steps. Above 1, the environment
    replies between turns (docs/turns.md), and `inference_model.max_tokens` limits all turns and replies
    together. Unset: 1, or 16 with `env.environment`, or 64 with `env.agent`."""
    reasoning: bool = False
    """Sends `reasoning_prompt` to the model after every turn without a tool call."""
    reasoning_prompt: str = "Think again: check your answer, then give the final one in the form you were asked for."
    """Text of the environment's reply for `reasoning`."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call: `calculator`, `python` (in the sandbox), your own functions and classes,
    `module:function` or `module:Class`, and MCP servers, `mcp:COMMAND ARGS` or `mcp:http://HOST:PORT/mcp`
    (docs/tools.md)."""
    tool_parser: str = "auto"
    """Form of the model's tool calls: `auto` for the form that its chat template shows, or a form by name
    (docs/tools.md). `vllm:NAME` is a parser of vLLM, such as `vllm:hermes`."""
    tool_format: str = "native"
    """`native`: the chat template writes schemas and calls in the form of the model's family. `tags`: the system
    prompt describes the tools, and a call is `<NAME>request</NAME>` at the end of a turn, with any chat template."""
    tool_timeout_s: float = 10.0
    """Maximum seconds for a call of your own tool or of an MCP server; then the model reads a time-out message. The
    start of an MCP server may take six times as long."""
    tool_result_characters: int = 2000
    """Maximum number of characters of a tool's result. Of a longer result the model reads beginning and end, and
    how much is cut."""

    def __post_init__(self) -> None:
        check_minimum("env.reward_workers", self.reward_workers, 1)
        check_minimum("env.max_prompt_tokens", self.max_prompt_tokens, 1)
        check_minimum("env.tool_result_characters", self.tool_result_characters, MIN_RESULT_CHARACTERS)
        check_choice("env.tool_format", self.tool_format, TOOL_FORMATS)
        check_choice("env.duplicates", self.duplicates, ("keep", "first", "drop"))
        check_choice("env.sandbox", self.sandbox, ("auto", "bubblewrap", "namespaces", "rlimits", "remote"))
        url = self.sandbox_url
        if self.sandbox != "remote" and url is not None:
            raise ConfigError(
                f"env.sandbox_url={url}: the server is unused with env.sandbox={self.sandbox}; set env.sandbox=remote"
            )
        if self.sandbox == "remote" and not (url or "").startswith(("http://", "https://")):
            raise ConfigError(
                f"env.sandbox_url={url}: env.sandbox=remote needs the address of a server; set "
                "env.sandbox_url=http://HOST:PORT"
            )
        check_fields("env", self, ("holdout",), lambda value: 0 <= value < 1, "must be a share from 0 to below 1")
        seconds = ("reward_timeout_s", "tool_timeout_s", "step_timeout_s", "episode_timeout_s")
        check_fields("env", self, (*seconds, "reward_memory_gib"), is_positive, "must be above 0")
        check_fields("env", self, ("max_error_rate",), is_share, "must be a share from 0 to 1")
        skips_prompts = self.difficulty.low > 0 or self.difficulty.high < 1
        self.curriculum.check_data(self.dataset, self.mixture, skips_prompts)
        self._check_rewards()
        unknown = [tool for tool in self.tools if tool not in TOOLS.names and ":" not in tool]
        if unknown:
            raise ConfigError(
                f"env.tools={unknown}: no such tool; choose from {', '.join(TOOLS.names)}, or name a tool of "
                "your own as module:function, or an MCP server as mcp:COMMAND"
            )
        self._check_turns()
        self._check_environment()

    def _check_turns(self) -> None:
        """Checks that the number of turns and the replies between them agree."""
        check_minimum("env.max_steps", self.max_steps, 1)
        check_agent(self.agent, self.agent_env, self.agent_columns, self.options.get("answer"))
        replies = self.reasoning or self.tools
        if self.agent is not None and (self.environment is not None or replies):
            raise ConfigError(
                f"env.agent={self.agent!r} with env.environment={self.environment}, env.tools={self.tools}, "
                f"env.reasoning={self.reasoning}: the agent itself replies to the model; unset all but one"
            )
        if self.agent is not None or self.environment is not None:
            return
        if self.turn_limit > 1 and not replies:
            raise ConfigError(
                f"env.max_steps={self.max_steps}: there is no reply between turns; set env.reasoning=true or "
                "env.tools=[calculator], or leave env.max_steps at 1"
            )
        if self.turn_limit == 1 and replies:
            raise ConfigError(
                f"env.reasoning={self.reasoning}, env.tools={self.tools}: a reply needs a second turn; set "
                "env.max_steps=2 or more"
            )

    def _check_environment(self) -> None:
        """Checks the environment's name, and that its settings are in use."""
        for key in ("environment_workers", "episodes", "turn_tokens", "max_episode_tokens"):
            check_minimum(f"env.{key}", vars(self)[key], 1)
        check_choice("env.history", self.history, ("template", "append"))
        if not all(self.turn_ends):
            raise ConfigError(f"env.turn_ends={self.turn_ends}: an empty text ends every turn; remove it")
        if self.turn_tokens and self.max_episode_tokens and self.turn_tokens > self.max_episode_tokens:
            raise ConfigError(
                f"env.turn_tokens={self.turn_tokens} is above env.max_episode_tokens={self.max_episode_tokens}: lower "
                "env.turn_tokens"
            )
        if self.environment is None:
            if self.environment_options or self.environment_workers:
                raise ConfigError(
                    f"env.environment_options={self.environment_options}, env.environment_workers="
                    f"{self.environment_workers}: there is no environment; set env.environment"
                )
            if self.dataset == ENVIRONMENT_PROMPTS:
                raise ConfigError(
                    f"env.dataset={self.dataset}: these are the prompts of env.environment, which is unset; set "
                    "env.environment, or another env.dataset"
                )
            return
        if ":" not in self.environment and self.environment not in ENVIRONMENTS.names:
            raise ConfigError(
                f"env.environment={self.environment!r}: no such environment; choose one of "
                f"{', '.join(ENVIRONMENTS.names)}, or name your own as module:Class or module:function"
            )
        if self.reasoning:
            raise ConfigError(
                f"env.reasoning=true with env.environment={self.environment}: both reply to the model; set "
                "env.reasoning=false"
            )

    def _check_rewards(self) -> None:
        reward, weights = self.reward, self.reward_weights
        names = reward if isinstance(reward, list) else [] if reward is None else [reward]
        if reward == [] or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"env.reward={reward!r}: give the name of a reward, or a list of names")
        duplicates = [name for name in names if names.count(name) > 1]
        if duplicates:
            raise ConfigError(
                f"env.reward: {duplicates[0]} is listed twice; list each reward once, with its weight in "
                "env.reward_weights"
            )
        values = list(weights.values()) if isinstance(weights, dict) else [] if weights is None else weights
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
        ):
            raise ConfigError(
                f"env.reward_weights={weights!r}: weights must be finite numbers; set {{COMPONENT: weight}} "
                "or, for a list of rewards, a list"
            )
        if isinstance(weights, list) and (not isinstance(reward, list) or len(weights) != len(reward)):
            raise ConfigError(
                f"env.reward_weights={weights!r} has {len(weights)} weights for env.reward={reward!r}: set "
                "one weight for each reward"
            )
        if isinstance(reward, list) and isinstance(weights, dict) and weights:
            example = f"[{','.join(['1.0'] * len(reward))}]"
            raise ConfigError(
                f"env.reward_weights={weights!r} names components of one reward, but env.reward is a list: "
                f"set one weight for each reward in order, such as env.reward_weights={example}"
            )
        if self.group_reward is not None and ":" not in self.group_reward:
            raise ConfigError(
                f"env.group_reward={self.group_reward!r}: give a function of your own as module:function, or null"
            )
        if reward in MODEL_REWARDS and isinstance(weights, dict) and set(weights) - {reward}:
            raise ConfigError(
                f"env.reward_weights={weights!r}: the only component of env.reward={reward} is {reward}; set "
                f"env.reward_weights={{{reward}: 1.0}}, or remove the weights"
            )
        fallback = self.fallback_reward
        if fallback and (fallback in MODEL_REWARDS or reward in MODEL_REWARDS):
            raise ConfigError(
                f"env.fallback_reward={fallback} with env.reward={reward}: {' and '.join(MODEL_REWARDS)} neither have "
                f"nor are a fallback; list both rewards, such as env.reward=[{fallback},{reward}]"
            )
        if fallback == "":
            raise ConfigError("env.fallback_reward='': give the name of a reward, or null for none")
        if fallback and isinstance(reward, list):
            raise ConfigError(
                f"env.fallback_reward={fallback} with the list env.reward={reward!r}: a fallback reward replaces the "
                "outcome of a single reward; name one reward"
            )
        if fallback and fallback == reward:
            raise ConfigError(
                f"env.fallback_reward={fallback} is the same as env.reward; name another reward, or null for none"
            )

    @property
    def candidates(self) -> int:
        """Number of completions generated for a prompt."""
        return self.oversample or self.repeats

    @property
    def plays_episodes(self) -> bool:
        """Whether an agent, an environment, tools or a reflection prompt reply between turns."""
        return self.agent is not None or self.environment is not None or self.turn_limit > 1

    @property
    def turn_limit(self) -> int:
        """Maximum number of turns of the model in one completion."""
        if self.max_steps is not None:
            return self.max_steps
        if self.agent is not None:
            return DEFAULT_AGENT_TURNS
        return 1 if self.environment is None else DEFAULT_ENVIRONMENT_TURNS
