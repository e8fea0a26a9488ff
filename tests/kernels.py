"""vLLM's kernels for CPUs, put in their places once for a process.

vLLM does it at each start of an engine, and searches all modules for copies of the kernels: a quarter of a second.
"""

from functools import cache


@cache
def bind_once() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
