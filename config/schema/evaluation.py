"""The `eval` section: evaluation sets, their sampling parameters and `env` sections, and the frequency."""

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.values import build_section, check_fields, check_minimum, is_share


@dataclass
class EvalSetConfig:
    """Settings of an evaluation set.

    For the data set of training, unset fields have the values of training.
    """

    dataset: str = ""
    """Registered task name, as in `env.dataset`."""
    data_files: Any = None
    """Local files, as in `env.data_files`. Unset: the files of `env` for the same data set, else the hub."""
    data_revision: str | None = None
    """As `env.data_revision`. Unset: the value of `env` for the same data set."""
    split: str = "test"
    """Split of the data set."""
    n: int = 1
    """Completions per problem; pass@k is reported for each k up to n."""
    temperature: float = 1.0
    """Sampling temperature; 0 selects the most likely token."""
    top_p: float = 1.0
    """Samples from the smallest set of tokens with this total probability; 1 keeps all tokens."""
    top_k: int = 0
    """Samples only from the k most likely tokens; 0 keeps all tokens."""
    min_p: float = 0.0
    """Samples only from tokens whose probability is at least this share of the most likely token's; 0 keeps all."""
    max_tokens: int | None = None
    """Maximum response length in tokens. Unset: `inference_model.max_tokens`."""
    limit: int | None = None
    """Maximum number of problems, a random choice that is the same in all runs. Unset: all problems."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, merged over `env.options` for the same data set."""
    reward: Any = None
    """As `env.reward`. Unset: for the same data set `env.reward` with `env.fallback_reward`, else the task's
    own reward."""
    reward_weights: Any = None
    """As `env.reward_weights`, for the `reward` of this set."""
    system_prompt: str | None = None
    """As `env.system_prompt`. Unset: the value of `env` for the same data set, else the task's own."""
    prefill: str | None = None
    """As `env.prefill`. Unset: the value of `env` for the same data set, else none."""

    def check(self, place: str) -> None:
        """Raises ConfigError for invalid fields. place: the key of this set in the config."""
        if not self.dataset:
            raise ConfigError(f"{place}.dataset: no value; name a task, such as {place}.dataset=gsm8k")
        for key, least in (("n", 1), ("max_tokens", 1), ("limit", 1), ("temperature", 0), ("top_k", 0)):
            check_minimum(f"{place}.{key}", vars(self)[key], least)
        check_fields(place, self, ("top_p",), lambda value: 0 < value <= 1, "must lie in (0, 1]")
        check_fields(place, self, ("min_p",), is_share, "must lie in [0, 1]")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"{place}.n={self.n} with {place}.temperature=0: greedy decoding gives the same completion "
                f"{self.n} times; set n=1, or a temperature above 0"
            )

    def metrics(self, name: str) -> list[str]:
        """Returns the metric names of this set for which a higher value is better.

        name: the name of the set.
        """
        keys = (*(f"pass@{k}" for k in range(1, self.n + 1)), f"avg@{self.n}", "score")
        return [f"eval/{name}/{key}" for key in keys]

    def env(self, place: str, training: EnvConfig) -> EnvConfig:
        """Returns the `env` section of this set.

        The data are those of the set, all other settings are those of training.

        Raises:
            ConfigError: the set would read the rows of training.
        """
        base = training = replace(training, curriculum=CurriculumConfig())
        if self.dataset != training.dataset:
            data_fields = (
                *("data_files", "data_revision", "holdout", "duplicates", "mixture", "options", "prefill"),
                *("system_prompt", "reward", "reward_weights", "fallback_reward"),
            )
            defaults = vars(EnvConfig())
            base = replace(training, **{key: defaults[key] for key in data_fields})
        files = base.data_files if self.data_files is None else self.data_files
        shared = base is training and _resolved_paths(files) == _resolved_paths(training.data_files)
        for member, member_settings in base.mixture.items() if self.dataset == "mixture" else ():
            member_env = dict(member_settings) if isinstance(member_settings, dict) else {}
            if (
                self.split != training.split
                and not member_env.get("holdout")
                and _has_one_split(member_env.get("data_files"))
            ):
                raise ConfigError(
                    f"{place}.split={self.split}: env.mixture.{member}.data_files={member_env['data_files']} "
                    f"holds one split, so these are prompts of training; set env.mixture.{member}.holdout (a "
                    f"share of the rows that becomes `test`), or {place}.split={training.split} to evaluate "
                    "training prompts"
                )
        separated = training.holdout > 0 or self.split == training.split
        if shared and _has_one_split(files) and not separated:
            raise ConfigError(
                f"{place}.split={self.split}: env.data_files={files} holds one split, so these are the "
                f"prompts of training; set {place}.data_files, or env.holdout (a share of the rows that "
                f"becomes `test`), or {place}.split={training.split} to evaluate training prompts"
            )
        own = {"reward": self.reward, "system_prompt": self.system_prompt, "prefill": self.prefill}
        return replace(
            base,
            dataset=self.dataset,
            data_files=files,
            data_revision=self.data_revision or (base.data_revision if files is None else None),
            holdout=training.holdout if shared else 0.0,
            split=self.split,
            repeats=self.n,
            oversample=None,
            reward_weights=self.reward_weights or (base.reward_weights if self.reward is None else None),
            fallback_reward=base.fallback_reward if self.reward is None else None,
            options=base.options | self.options,
            **{key: value for key, value in own.items() if value is not None},
        )


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts with the engines of training."""

    sets: dict[str, Any] = field(default_factory=dict)
    """Evaluation sets: NAME: {dataset, data_files, split, n, temperature, top_p, ...} with the fields of
    `EvalSetConfig`."""
    frequency: int = 0
    """Iterations between evaluations. All sets are also evaluated before the first iteration and at the end. 0:
    only then."""

    def __post_init__(self) -> None:
        check_minimum("eval.frequency", self.frequency, 0)
        self.sets = {name: _build_eval_set(f"eval.sets.{name}", settings) for name, settings in self.sets.items()}


def _has_one_split(files: Any) -> bool:
    return files is not None and not isinstance(files, dict)


def _resolved_paths(files: Any) -> Any:
    """Returns `data_files` with absolute paths; None for the hub."""
    if files is None:
        return None
    if isinstance(files, dict):
        return {split: _resolved_paths(split_files) for split, split_files in files.items()}
    return [Path(str(file)).resolve() for file in (files if isinstance(files, list) else [files])]


def _build_eval_set(place: str, settings: Any) -> EvalSetConfig:
    """Builds and checks an evaluation set from its settings. place: its key in the config."""
    name = place.rpartition(".")[2]
    if not re.fullmatch(r"[\w\-]+", name):
        raise ConfigError(f"{place}: the name of a set becomes the name of a folder; use letters, digits, - and _ only")
    if isinstance(settings, EvalSetConfig):
        return settings
    if not isinstance(settings, dict):
        raise ConfigError(f"{place}={settings!r}: give the fields of the set, such as {{dataset: gsm8k, n: 4}}")
    known = [entry.name for entry in fields(EvalSetConfig)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
            raise ConfigError(f"{place}.{key}: no such configuration key; {hint}")
    eval_set = build_section(EvalSetConfig, settings, place)
    eval_set.check(place)
    return eval_set
