"""Shared by all tests: one thread, no hub, the same properties at each run, and a Ray that a module shares."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    from rollout.engines.ray_runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()
