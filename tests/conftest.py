"""Shared by all tests: one thread, no hub, the same examples of hypothesis at each run, one Ray for a process."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

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

    from torchgrpo.cluster.runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def lockstep_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations of a step each; evaluated after 0, 2 and 4, with a checkpoint after 2 and 4."""
    from tests.recorded_runs import EVERY_SECOND, recorded_run

    return recorded_run(tmp_path_factory.mktemp("lockstep"), *EVERY_SECOND)


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with dropout and four steps in an iteration, else as `lockstep_run`."""
    from tests.recorded_runs import ADAPTER, recorded_run

    return recorded_run(tmp_path_factory.mktemp("lora"), *ADAPTER)


@pytest.fixture(scope="session")
def overlapped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run beside generation, with tokens of earlier weights; evaluated after 0 and 4."""
    import grpo_async
    from tests.recorded_runs import SETS, STEPS, recorded_run

    ahead = ("train.max_policy_age=2", "train.weight_update_frequency=3", "train.checkpoint_frequency=4")
    return recorded_run(tmp_path_factory.mktemp("overlapped"), STEPS[0], *ahead, SETS, script=grpo_async)


@pytest.fixture(scope="session")
def ranked_run(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A learner of two ranks, with a checkpoint after 2 and 4."""
    from tests.recorded_runs import recorded_run

    two = ("train_model.num_devices=2", "train.checkpoint_frequency=2")
    return recorded_run(tmp_path_factory.mktemp("ranked"), *two)
