"""Shared settings and fixtures of all tests.

Tests use one thread, no hub, deterministic examples of hypothesis, and one Ray cluster per process.
"""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.log_capture import LogCapture

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells start background jobs with SIGINT ignored, and child processes of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture
def log_capture() -> Iterator[LogCapture]:
    root, handler = logging.getLogger(), LogCapture()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A local Ray cluster for all tests of this process."""
    import ray

    from torchgrpo.cluster.runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def lockstep_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a lockstep run of four iterations with one step each.

    The run has evaluations after iterations 0, 2 and 4, and checkpoints after 2 and 4.
    """
    from tests.recorded_runs import EVERY_SECOND, recorded_run

    return recorded_run(tmp_path_factory.mktemp("lockstep"), *EVERY_SECOND)


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run as `lockstep_run`, with LoRA, dropout and four steps per iteration."""
    from tests.recorded_runs import ADAPTER, recorded_run

    return recorded_run(tmp_path_factory.mktemp("lora"), *ADAPTER)


@pytest.fixture(scope="session")
def overlapped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an overlapped run with aged tokens, evaluated after iterations 0 and 4."""
    import grpo_async
    from tests.recorded_runs import SETS, STEPS, recorded_run

    ahead = ("train.max_policy_age=2", "train.weight_update_frequency=3", "train.checkpoint_frequency=4")
    return recorded_run(tmp_path_factory.mktemp("overlapped"), STEPS[0], *ahead, SETS, script=grpo_async)


@pytest.fixture(scope="session")
def ranked_run(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with two learner ranks and checkpoints after 2 and 4."""
    from tests.recorded_runs import recorded_run

    two = ("train_model.num_devices=2", "train.checkpoint_frequency=2")
    return recorded_run(tmp_path_factory.mktemp("ranked"), *two)
