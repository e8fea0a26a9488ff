"""Transports that vLLM brings, `nccl` and `ipc`: straight into the engines' GPUs, beside a host copy."""

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.outgoing import DirectTransfer
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory


def make_transport(plan: Plan) -> Transport:
    """The transport that `plan.transport` names."""
    from torchgrpo.cluster.runtime import own_address
    from torchgrpo.rollout.engines.vllm_settings import import_in_thread
    from torchgrpo.rollout.weights.from_ranks import TransferFromRanks

    import_in_thread("torchgrpo.rollout.weights.vllm_transfer")  # it brings vLLM
    from torchgrpo.rollout.weights.vllm_transfer import LOOPBACK, NativeTransfer

    inference, on_cluster = plan.config.inference_model, plan.devices.on_cluster
    direct: DirectTransfer = NativeTransfer(
        plan.transport,
        inference.tensor_parallel_size,
        own_address if on_cluster else lambda: LOOPBACK,
        timeout=inference.request_timeout_s,
    )
    if plan.devices.ranks > 1:
        direct = TransferFromRanks(direct)
    return Transport(ObjectStore() if on_cluster else SharedMemory(), direct)
