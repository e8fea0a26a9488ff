"""The transport `ipc`: vLLM's own, within the one GPU that learner and engines share, beside a host copy."""

from torchgrpo.rollout.weights.vllm_transport import make_transport as make_transport
