"""The `ray` section: the cluster that carries several engines and ranks."""

from dataclasses import dataclass

from config.schema.values import above_0, check_fields


@dataclass
class RayConfig:
    """The Ray cluster that carries several engines."""

    enabled: bool = False
    """Run engines as Ray actors even where one engine in process would do."""
    address: str | None = None
    """An existing cluster's address; unset starts a local one on loopback."""
    num_cpus_per_engine: int = 1
    """CPU cores that an engine actor reserves."""

    def __post_init__(self) -> None:
        check_fields("ray", self, ("num_cpus_per_engine",), above_0, "must be above 0")
