"""The transport `nccl`: vLLM's own, from the learner's GPUs to others, beside a host copy."""

from torchgrpo.rollout.weights.native import make_transport

__all__ = ["make_transport"]
