"""Shared by all tests: one thread, no hub, the same examples of hypothesis at each run, one Ray for a process."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.logged import Logged

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell starts its background jobs; every process that a test interrupts would have that from us.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture
def logged() -> Iterator[Logged]:
    root, handler = logging.getLogger(), Logged()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray for all tests of this process; runs that need one take it."""
    import ray

    from cluster.runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()
