"""Decides whether decoder layers are compiled, with the reason if not.

The module imports no torch.
"""

from config.schema.config import Config
from torchgrpo.plan.devices import DevicePlan
from torchgrpo.plan.machine import Machine
from torchgrpo.plan.model_shape import ModelShape
from torchgrpo.plan.plan import EnginePlan


def compiles_layers(
    config: Config,
    is_overlapped: bool,
    machine: Machine,
    devices: DevicePlan,
    engine: EnginePlan,
    shape: ModelShape | None,
) -> bool:
    """Whether decoder layers are compiled: as configured, else on GPUs where possible.

    shape: sizes of the model; None: the loaded model decides.
    """
    if config.train.compile is not None:
        return config.train.compile
    return not devices.on_cpu and reason_against(config, is_overlapped, machine, devices, engine, shape) is None


def reason_against(
    config: Config,
    is_overlapped: bool,
    machine: Machine,
    devices: DevicePlan,
    engine: EnginePlan,
    shape: ModelShape | None,
) -> str | None:
    """Returns the reason not to compile layers unless the user configures it, or None."""
    missing = (*machine.missing_for_kernels, *machine.missing_to_compile)
    if shape is not None and not shape.can_compile_layers:
        return "the layers of this architecture are not known to compile; set train.compile=true to try"
    if config.train_model.lora.quantized:
        return "layers in 4 bits are not known to compile; set train.compile=true to try"
    if config.train_model.context_parallel > 1:
        return "layers whose ranks share a microbatch are not known to compile; set train.compile=true to try"
    if missing:
        return f"torch.compile does not find {' and '.join(dict.fromkeys(missing))} on this machine"
    if disables_compilation(is_overlapped, devices, engine):
        return "vLLM in the learner's process, with inference_model.enforce_eager=true, switches compiled code off"
    return None


def disables_compilation(is_overlapped: bool, devices: DevicePlan, engine: EnginePlan) -> bool:
    """Whether an engine in the learner's process switches compiled code off whenever it generates."""
    is_eager_vllm = engine.backend == "vllm" and engine.enforce_eager
    return is_overlapped and is_eager_vllm and devices.in_process and devices.ranks == 1
