"""Shared by all tests: one thread, no hub, and a Ray that the tests of a module share."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    from rollout.ray_runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()
