"""The transport `nccl`: vLLM's own, from the learner's GPUs to others, beside a host copy."""

from torchgrpo.rollout.weights.vllm_transport import make_transport as make_transport
