"""What vLLM does anew at each start of an engine, done once."""

from functools import cache


@cache
def prepare_vllm() -> None:
    """Puts its kernels for CPUs in their places, for which it searches all modules: a quarter of a second."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
