"""The sections `env.judge` and `env.reward_model`: rewards that a language model computes, in the run's loop."""

import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from config.schema.errors import ConfigError
from config.schema.values import check_choice, check_fields, check_minimum, is_positive_finite

MODEL_REWARDS = ("judge", "reward_model")
"""Names in `env.reward` that are scored in the run's loop and not in the reward workers."""


@dataclass
class JudgeConfig:
    """Server with OpenAI's chat API that grades completions, with `env.reward=judge`."""

    url: str | None = None
    """Base URL of the server, such as `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key. Unset: no key is sent."""
    rubric: str | None = None
    """Text of the rubric. Unset: grades by agreement with the reference answer, or without one by quality."""
    rubric_file: str | None = None
    """File with the text of the rubric, in UTF-8, in place of `rubric`."""
    rubric_column: str | None = None
    """Column of the row with a rubric of its own, which the judge reads after `rubric`."""
    scale: int = 10
    """Highest grade. The score is the grade, a whole number from 0, divided by this; 1 means right or wrong."""
    max_tokens: int | None = 1024
    """Maximum number of tokens of a reply. `null`: not sent."""
    temperature: float | None = 0.0
    """Sampling temperature of the judge. `null`: not sent."""
    concurrency: int = 16
    """Maximum number of requests at a time."""
    requests_per_minute: float | None = None
    """Maximum rate of requests, retries included. Unset: no maximum."""
    retries: int = 5
    """Maximum number of repetitions of a request after HTTP status 408, 429 or 5xx, a connection error, a time-out or
    a reply without a grade. The pause doubles with each; a `Retry-After` of the server makes it longer."""
    timeout_s: float = 60.0
    """Maximum seconds of one request."""
    budget: int | None = None
    """Maximum number of requests of a run, retries included; beyond it, the run stops. Unset: no maximum."""
    cache: str | None = None
    """Folder that keeps grades by the content of their requests, for several runs. Unset: only in memory."""

    def __post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"env.judge.url={self.url}: not the address of a server; set env.judge.url=http://HOST:PORT/v1"
            )
        for key, least in (("scale", 1), ("max_tokens", 1), ("concurrency", 1), ("retries", 0), ("budget", 1)):
            check_minimum(f"env.judge.{key}", vars(self)[key], least)
        check_minimum("env.judge.temperature", self.temperature, 0)
        limits = ("requests_per_minute", "timeout_s")
        check_fields("env.judge", self, limits, is_positive_finite, "must be above 0 and finite")
        if self.rubric is not None and self.rubric_file is not None:
            raise ConfigError(
                f"env.judge.rubric and env.judge.rubric_file={self.rubric_file} are both set; remove one of them"
            )

    def check_complete(self) -> None:
        """Raises ConfigError if a needed setting is missing or the rubric cannot be read."""
        for key, example in (("url", "http://HOST:PORT/v1"), ("model", "NAME")):
            if not vars(self)[key]:
                raise ConfigError(
                    f"env.reward=judge: env.judge.{key} is unset; set env.judge.{key}={example}, or remove judge from "
                    "env.reward"
                )
        self.read_rubric()

    def read_rubric(self) -> str | None:
        """Returns the text of the rubric; None if it is unset.

        Raises:
            ConfigError: the file cannot be read, or the rubric is empty.
        """
        place, text = "env.judge.rubric", self.rubric
        if self.rubric_file is not None:
            place = f"env.judge.rubric_file={self.rubric_file}"
            try:
                text = Path(self.rubric_file).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{place}: cannot be read ({error}; looked from {Path.cwd()}); give a text file in UTF-8"
                ) from error
        if text is not None and not text.strip():
            raise ConfigError(f"{place}: the rubric is empty; write a rubric, or remove the setting")
        return text

    def read_api_key(self) -> str | None:
        """Returns the API key, or None. Raises ConfigError if the environment variable is unset."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise ConfigError(
                f"env.judge.api_key_env={self.api_key_env}: no such environment variable, or it is empty; give the "
                "name of the variable that holds the key, and export it"
            )
        return key


@dataclass
class RewardModelConfig:
    """Sequence classifier of transformers that scores completions, with `env.reward=reward_model`."""

    name: str | None = None
    """Folder in Hugging Face format, or a name on the hub. The score is the logit of the model's label."""
    label: int | None = None
    """Index of the label that is the score. Unset: the model has one label."""
    device: str = "cpu"
    """Device of the reward model, such as `cuda:1`. Choose a device that learner and engines leave free."""
    dtype: str = "float32"
    """Data type of the weights: `float32` or `bfloat16`."""
    batch_size: int = 16
    """Maximum number of completions in one forward pass."""
    max_length: int | None = None
    """Maximum number of tokens of prompt and completion; the outcome of a longer text is `error`. Unset: the
    maximum of the model and its tokenizer."""

    def __post_init__(self) -> None:
        check_choice("env.reward_model.dtype", self.dtype, ("float32", "bfloat16"))
        for key, least in (("label", 0), ("batch_size", 1), ("max_length", 1)):
            check_minimum(f"env.reward_model.{key}", vars(self)[key], least)

    def check_complete(self) -> None:
        """Raises ConfigError if the name of the model is missing."""
        if not self.name:
            raise ConfigError(
                "env.reward=reward_model: env.reward_model.name is unset; set env.reward_model.name=FOLDER, or remove "
                "reward_model from env.reward"
            )


def check_model_rewards(judge: JudgeConfig, reward_model: RewardModelConfig, reward_names: Collection[str]) -> None:
    """Checks that the model rewards in use are complete, and that no others have settings.

    reward_names: all names in `env.reward`, in `eval.sets.NAME.reward` and in `env.mixture.NAME.reward`.

    Raises:
        ConfigError: a setting is missing, or has no effect.
    """
    sections: tuple[JudgeConfig | RewardModelConfig, ...] = (judge, reward_model)
    for name, section in zip(MODEL_REWARDS, sections, strict=True):
        if name in reward_names:
            section.check_complete()
            continue
        defaults = type(section)()
        for field in fields(section):
            value = vars(section)[field.name]
            if value != vars(defaults)[field.name]:
                raise ConfigError(
                    f"env.{name}.{field.name}={value}: no reward is called {name}; set env.reward={name} or "
                    f"env.reward=[...,{name}], or remove env.{name}.*"
                )
