"""The `ray` section: the Ray cluster that runs several engines and learner ranks."""

from dataclasses import dataclass

from config.schema.values import check_fields, is_positive


@dataclass
class RayConfig:
    """The Ray cluster that runs several engines and learner ranks."""

    enabled: bool = False
    """Runs engines as Ray actors even where a single engine could run in the main process."""
    address: str | None = None
    """Address of an existing cluster. Unset: a local cluster on the loopback interface."""
    num_cpus_per_engine: int = 1
    """CPU cores that each engine actor reserves."""

    def __post_init__(self) -> None:
        check_fields("ray", self, ("num_cpus_per_engine",), is_positive, "must be above 0")
