"""What vLLM does anew at each start of an engine, or in a process of its own, done once and here."""

from functools import cache


@cache
def prepare_vllm() -> None:
    """Puts its kernels for CPUs in their places, for which it searches all modules: a quarter of a second. Looks at a
    model's class in this process: another one, which no CUDA needs here, imports vLLM for seven seconds."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    registry._run_in_subprocess = lambda look: look()
