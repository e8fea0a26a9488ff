"""The `eval` section: held-out sets, how each is sampled, and how often they are evaluated."""

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.values import at_least, check_fields, section_of


@dataclass
class EvalSetConfig:
    """One evaluation set; unset fields are those of training where the data set is the same."""

    dataset: str = ""
    """Registered task name, as in `env.dataset`."""
    data_files: Any = None
    """Local files, as in `env.data_files`. Unset: those of `env` where the data set is the same, else the hub."""
    data_revision: str | None = None
    """As `env.data_revision`. Unset: that of `env` where the data set is the same."""
    split: str = "test"
    """Which part of the data set."""
    n: int = 1
    """Completions per problem; pass@k is reported for every k up to n."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Smallest set of tokens with this much probability is sampled from; 1 keeps all."""
    top_k: int = 0
    """Only the k likeliest tokens are sampled from; 0 keeps all."""
    max_tokens: int | None = None
    """Longest response in tokens. Unset: `inference_model.max_tokens`."""
    limit: int | None = None
    """At most this many problems: a random choice that is the same in every run. Unset: all."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options, on top of `env.options` where the data set is the same."""
    reward: Any = None
    """As `env.reward`. Unset: that of `env` where the data set is the same, with its second opinion, else the task's
    own."""
    reward_weights: Any = None
    """As `env.reward_weights`, for the `reward` of this set."""
    system_prompt: str | None = None
    """As `env.system_prompt`. Unset: that of `env` where the data set is the same, else the task's own."""
    prefill: str | None = None
    """As `env.prefill`. Unset: that of `env` where the data set is the same, else none."""

    def check(self, place: str) -> None:
        """Raises ConfigError; `place` is the key of this set."""
        if not self.dataset:
            raise ConfigError(f"{place}.dataset: no value; name a task, such as {place}.dataset=gsm8k")
        for key, least in (("n", 1), ("max_tokens", 1), ("limit", 1), ("temperature", 0), ("top_k", 0)):
            at_least(f"{place}.{key}", vars(self)[key], least)
        check_fields(place, self, ("top_p",), lambda value: 0 < value <= 1, "must lie in (0, 1]")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(
                f"{place}.n={self.n} with {place}.temperature=0: greedy decoding gives the same completion "
                f"{self.n} times; set n=1, or a temperature above 0"
            )

    def metrics(self, name: str) -> list[str]:
        """Metrics of this set, called `name`, of which a higher value is better."""
        keys = (*(f"pass@{k}" for k in range(1, self.n + 1)), f"avg@{self.n}", "score")
        return [f"eval/{name}/{key}" for key in keys]

    def env(self, place: str, training: EnvConfig) -> EnvConfig:
        """The `env` section of this set: its own data, everything else as in training.

        Raises:
            ConfigError: the set would read the very rows that are trained on.
        """
        base = training = replace(training, curriculum=CurriculumConfig())
        if self.dataset != training.dataset:
            of_the_data = (
                *("data_files", "data_revision", "holdout", "duplicates", "mixture", "options", "prefill"),
                *("system_prompt", "reward", "reward_weights", "reward_second_opinion"),
            )
            usual = vars(EnvConfig())
            base = replace(training, **{key: usual[key] for key in of_the_data})
        files = base.data_files if self.data_files is None else self.data_files
        shared = base is training and _places(files) == _places(training.data_files)
        for member, given in base.mixture.items() if self.dataset == "mixture" else ():
            its = dict(given) if isinstance(given, dict) else {}
            if (
                self.split != training.split
                and not its.get("holdout")
                and _holds_one_split(its.get("data_files"))
            ):
                raise ConfigError(
                    f"{place}.split={self.split}: env.mixture.{member}.data_files={its['data_files']} holds one split, "
                    f"so these are prompts of training; set env.mixture.{member}.holdout (a share of the rows that "
                    f"becomes `test`), or {place}.split={training.split} if that is what you want"
                )
        separated = training.holdout > 0 or self.split == training.split
        if shared and _holds_one_split(files) and not separated:
            raise ConfigError(
                f"{place}.split={self.split}: env.data_files={files} holds one split, so these are the prompts of "
                f"training; set {place}.data_files, or env.holdout (a share of the rows that becomes `test`), or "
                f"{place}.split={training.split} if that is what you want"
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
            reward_second_opinion=base.reward_second_opinion if self.reward is None else None,
            options=base.options | self.options,
            **{key: value for key, value in own.items() if value is not None},
        )


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts, on the engines of training."""

    sets: dict[str, Any] = field(default_factory=dict)
    """NAME: {dataset, data_files, split, n, temperature, top_p, ...}; the fields are those of `EvalSetConfig`."""
    frequency: int = 0
    """Iterations between evaluations. With sets there is one before the first iteration and one at the end."""

    def __post_init__(self) -> None:
        at_least("eval.frequency", self.frequency, 0)
        self.sets = {name: _as_set(f"eval.sets.{name}", given) for name, given in self.sets.items()}


def _holds_one_split(files: Any) -> bool:
    return files is not None and not isinstance(files, dict)


def _places(files: Any) -> Any:
    """`data_files` however they were spelled; None for the hub."""
    if files is None:
        return None
    if isinstance(files, dict):
        return {split: _places(its) for split, its in files.items()}
    return [Path(str(each)).resolve() for each in (files if isinstance(files, list) else [files])]


def _as_set(place: str, given: Any) -> EvalSetConfig:
    name = place.rpartition(".")[2]
    if not re.fullmatch(r"[\w\-]+", name):
        raise ConfigError(f"{place}: the name of a set becomes a folder; take letters, digits, - and _ only")
    if isinstance(given, EvalSetConfig):
        return given
    if not isinstance(given, dict):
        raise ConfigError(f"{place}={given!r}: give the fields of the set, such as {{dataset: gsm8k, n: 4}}")
    known = [entry.name for entry in fields(EvalSetConfig)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{place}.{key}: no such configuration key; {hint}")
    made = section_of(EvalSetConfig, given, place)
    made.check(place)
    return made
