"""The `env` section: which prompts, how many completions, which reward, which limits."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class EnvConfig:
    """One dataset (or a weighted mixture) turned into prompts and rewards."""

    dataset: str = MISSING
    """Registered task name; `jsonl` reads any local file."""
    data_files: Any = None
    """Local JSONL or parquet file, or a list of them, read instead of the hub."""
    split: str = "train"
    num_envs: int = 32
    """Prompts (groups) generated in one iteration: with `repeats`, the completions of an iteration."""
    repeats: int = 16
    """Completions per prompt: the group size G."""
    oversample: int | None = None
    """Candidates generated for a prompt, above `repeats`: of these as many right as wrong ones are kept, where
    there are enough of both. Unset: `repeats`."""
    max_prompt_tokens: int = 512
    """A longer prompt is left out and counted, never cut."""
    system_prompt: str | None = None
    """Replaces the task's own system prompt; an empty string removes it."""
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own options (a generator's ranges, for example)."""

    @property
    def candidates(self) -> int:
        """Completions generated for a prompt."""
        return self.oversample or self.repeats
