"""Weight transport `ipc`: re-export of the factory, for vLLM's transfer inside a shared GPU."""

from torchgrpo.rollout.weights.vllm_transport_factory import make_transport as make_transport
