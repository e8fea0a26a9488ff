"""The sections `rewards`, `export`, `replay` and `serve`: settings of single jobs."""

from dataclasses import dataclass

from config.schema.errors import ConfigError


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


@dataclass
class ServeConfig:
    """Settings of `run=serve`, which answers requests of agents with an OpenAI-compatible server."""

    host: str = "127.0.0.1"
    """Address to listen on. Anyone who reaches another address than this and has the API key can use the model."""
    port: int = 8000
    """Port to listen on; 0 for a free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"serve.port={self.port}: a port is a number from 0 to 65535; set another serve.port")
