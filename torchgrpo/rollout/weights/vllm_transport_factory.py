"""Builds the weight transport `nccl` or `ipc`, and chooses its rank wrapper and host copy."""

from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import DirectTransfer


def make_transport(plan: Plan) -> WeightTransport:
    """Makes the transport that `plan.transport` names, `nccl` or `ipc`."""
    from torchgrpo.cluster.runtime import node_address
    from torchgrpo.rollout.engines.vllm_process import import_in_thread
    from torchgrpo.rollout.weights.sharded_weight_transfer import ShardedWeightTransfer

    import_in_thread("torchgrpo.rollout.weights.vllm_weight_transfer")  # imports vLLM
    from torchgrpo.rollout.weights.vllm_weight_transfer import LOOPBACK, VLLMWeightTransfer

    inference, on_cluster = plan.config.inference_model, plan.devices.on_cluster
    direct: DirectTransfer = VLLMWeightTransfer(
        plan.transport,
        inference.tensor_parallel_size,
        node_address if on_cluster else lambda: LOOPBACK,
        timeout=inference.request_timeout_s,
    )
    if plan.devices.ranks > 1:
        direct = ShardedWeightTransfer(direct)
    return WeightTransport(ObjectStore() if on_cluster else SharedMemory(), direct)
