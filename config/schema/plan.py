"""The `plan` section: the machine of `run=plan` and `run=rehearse`, and its GPUs' speed."""

from dataclasses import dataclass

from config.schema.values import at_least, check_fields, is_size


@dataclass
class MachineConfig:
    """The machine that `run=plan` and `run=rehearse` are for.

    With `gpus` it is another one than this, of which nothing is known but what is set here; without it, unset fields
    are what this machine has.
    """

    gpus: int | None = None
    """NVIDIA GPUs of one node."""
    gpu_memory_gib: float | None = None
    """Memory of one of them in GiB, as the card's name says. Unset: 80, an H100's, with `gpus`."""
    nodes: int = 1
    """Machines of this kind, joined by one Ray cluster."""
    host_memory_gib: float | None = None
    """Memory of one node in GiB. With `gpus` and unset it is not known, and not checked."""
    disk_gib: float | None = None
    """Free disk space where the run writes, in GiB. With `gpus` and unset it is not known, and not checked."""
    gpu_tflops: float = 989.0
    """run=rehearse: half-precision arithmetic of a GPU, 10^12 operations a second. An H100 SXM's, as are the rest."""
    gpu_bandwidth_gib_s: float = 3120.0
    """run=rehearse: from and to the memory of a GPU."""
    link_gib_s: float = 419.0
    """run=rehearse: of a GPU to the others of its node (NVLink), each way."""
    network_gib_s: float = 46.6
    """run=rehearse: of a GPU to those of other nodes (400 Gbit/s), each way."""

    def __post_init__(self) -> None:
        at_least("plan.nodes", self.nodes, 1)
        check_fields("plan", self, ("gpus",), lambda value: value >= 0, "must be 0 or above")
        sizes = ("gpu_memory_gib", "host_memory_gib", "disk_gib")
        check_fields("plan", self, sizes, is_size, "must be a number above 0, or null")
        speeds = ("gpu_tflops", "gpu_bandwidth_gib_s", "link_gib_s", "network_gib_s")
        check_fields("plan", self, speeds, is_size, "must be a number above 0")

    @property
    def given(self) -> bool:
        """Whether any field is set."""
        return self != MachineConfig()
