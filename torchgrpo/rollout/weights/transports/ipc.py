"""The transport `ipc`: vLLM's own, within the one GPU that learner and engines share, beside a host copy."""

from torchgrpo.rollout.weights.native import make_transport

__all__ = ["make_transport"]
