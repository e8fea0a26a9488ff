"""The `machine` section: the hardware that `run=plan` and `run=dry_run` plan for."""

from dataclasses import dataclass

from config.schema.values import check_fields, check_minimum, is_positive_finite


@dataclass
class MachineConfig:
    """The machine that `run=plan` and `run=dry_run` plan for.

    With `gpus` set, the section describes another machine, and the plan knows only the fields that are set.
    Without `gpus`, unset fields are read from this machine.
    """

    gpus: int | None = None
    """Number of NVIDIA GPUs of one node. Unset: the plan is for this machine."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU in GiB. CUDA has less than a card's name: 79.1 of 80 GB, 139.8 of 141 GB. With `gpus` and
    unset: 80."""
    nodes: int = 1
    """Number of machines of this kind, joined in one Ray cluster."""
    host_memory_gib: float | None = None
    """Host memory of one node in GiB. With `gpus` and unset, host memory is not checked."""
    disk_gib: float | None = None
    """Free disk space for the run's files, in GiB. With `gpus` and unset, disk space is not checked."""
    gpu_tflops: float = 989.0
    """run=dry_run: half-precision throughput of a GPU in 10^12 operations per second. This default and the
    following ones are those of an H100 SXM."""
    gpu_bandwidth_gib_s: float = 3120.0
    """run=dry_run: memory bandwidth of a GPU in GiB per second."""
    link_gib_s: float = 335.0
    """run=dry_run: bandwidth that collectives reach between a GPU and the other GPUs of its node, in GiB per second
    each way. The default is 80% of NVLink's."""
    network_gib_s: float = 37.3
    """run=dry_run: bandwidth that collectives reach between a GPU and the GPUs of other nodes, in GiB per second
    each way. The default is 80% of 400 Gbit/s."""

    def __post_init__(self) -> None:
        check_minimum("machine.nodes", self.nodes, 1)
        check_fields("machine", self, ("gpus",), lambda value: value >= 0, "must be 0 or above")
        sizes = ("gpu_memory_gib", "host_memory_gib", "disk_gib")
        check_fields("machine", self, sizes, is_positive_finite, "must be a number above 0, or null")
        speeds = ("gpu_tflops", "gpu_bandwidth_gib_s", "link_gib_s", "network_gib_s")
        check_fields("machine", self, speeds, is_positive_finite, "must be a number above 0")

    @property
    def has_settings(self) -> bool:
        """Whether any field is set."""
        return self != MachineConfig()
