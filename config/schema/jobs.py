"""The sections `rewards`, `export` and `replay`: settings of single jobs."""

from dataclasses import dataclass


@dataclass
class RewardsConfig:
    """Settings of `run=rewards`, which scores saved completions."""

    completions: str | None = None
    """A JSONL file of {"row": index in the data file, "completion": text}, or the folder of a run, whose
    completions for training are scored again."""


@dataclass
class ExportConfig:
    """Settings of `run=export`, which writes the model of a checkpoint."""

    checkpoint: str | None = None
    """A checkpoint, or the folder of a run (its newest checkpoint)."""
    to: str | None = None
    """The folder that the model is written to; it must be new or empty."""
    hub: str | None = None
    """A name on the hub, USER/NAME, to upload the folder to. A new repository there is private."""


@dataclass
class ReplayConfig:
    """Settings of `run=replay`, which computes an optimizer step again."""

    step: int | None = None
    """The number of the optimizer step."""
