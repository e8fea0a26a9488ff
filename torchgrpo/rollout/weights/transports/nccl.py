"""Weight transport `nccl`: re-export of the factory, for vLLM's transfer between GPUs."""

from torchgrpo.rollout.weights.vllm_transport_factory import make_transport as make_transport
