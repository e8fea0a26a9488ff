"""The `plan` section: the machine that `run=plan` plans for, where it is another one than this."""

from dataclasses import dataclass

from config.errors import ConfigError


@dataclass
class MachineConfig:
    """The machine that `run=plan` plans for. Unset fields: what this machine has."""

    gpus: int | None = None
    """NVIDIA GPUs of one node."""
    gpu_memory_gib: float | None = None
    """Memory of one of them in GiB, as the card's name says: 80 for an H100 80GB."""
    nodes: int = 1
    """Machines of this kind, joined by one Ray cluster."""
    host_memory_gib: float | None = None
    """Memory of one node in GiB."""
    disk_gib: float | None = None
    """Free disk space where the run writes, in GiB."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"plan.nodes={self.nodes}: must be at least 1")
        if self.gpus is not None and self.gpus < 0:
            raise ConfigError(f"plan.gpus={self.gpus}: must be 0 or above")
        for key in ("gpu_memory_gib", "host_memory_gib", "disk_gib"):
            value = vars(self)[key]
            if value is not None and value <= 0:
                raise ConfigError(f"plan.{key}={value}: must be above 0, or null")

    @property
    def given(self) -> bool:
        """Whether any field is set."""
        return self != MachineConfig()
