"""Tests weight pushes from learner ranks directly to engines, in Ray actors."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.errors import RankLost
from tests.rollout.conftest import OpenPool, make_requests, open_pool, tiny_settings
from tests.rollout.conftest import tiny_llama as tall_llama
from tests.rollout.pool_engines import CallTransfer, CountingEngine
from tests.training.test_ranks import config_of, ranked_learner, two_ranks, weights
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.engine_pool import RayEnginePool
from torchgrpo.rollout.engines.interface import generate
from torchgrpo.rollout.weights.host_weight_copy import WeightTransport
from torchgrpo.rollout.weights.sharded_weight_transfer import ShardedWeightTransfer
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import LiveEngines, WeightUpdate
from torchgrpo.training.learner import Learner
from torchgrpo.training.ranks import Ranks

pytestmark = pytest.mark.long

__all__ = ["open_pool"]


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    ranks_pool = two_ranks()
    yield ranks_pool
    ranks_pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tall_llama(tied=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def learner(ranks: Ranks, model: str, tmp_path: Path) -> Learner:
    return ranked_learner(ranks, config_of(model, 2), tmp_path)


class SummingEngine(CountingEngine):
    """Engine whose scores are the sums of its weights, sorted by name."""

    def score(self, sequences: object) -> dict[str, list[list[float]]]:
        return {"": [[float(self.weights[name].sum()) for name in sorted(self.weights)]]}


def kill_once(victim: Path) -> Callable[[int], None]:
    def kill(version: int) -> None:
        if victim.exists():
            os.kill(int(victim.read_text()), signal.SIGKILL)
            victim.unlink()

    return kill


def push(pool: RayEnginePool, learner: Learner, version: int) -> None:
    pool.load(WeightUpdate(learner.publish(), learner.ranks), version)


def arrivals(pool: RayEnginePool) -> list[str]:
    return pool.supervisor.call_each("push_path", [{}] * len(pool.supervisor.engine_pids))


def sums(learner: Learner) -> list[float]:
    tensors = weights(learner)
    return [float(tensors[name].sum()) for name in sorted(tensors)]


def test_every_tensor_arrives(open_pool: OpenPool, learner: Learner) -> None:
    direct = ShardedWeightTransfer(CallTransfer())
    pool = open_pool(SummingEngine, engines=2, transport=WeightTransport(SharedMemory(), direct))
    for version in (1, 2):
        push(pool, learner, version)
        assert arrivals(pool) == ["direct", "direct"]
        assert [scores[0] for scores in pool.score([[1, 2]]).values()] == [sums(learner)] * 2


def test_an_engine_lost_in_a_push_costs_no_rank(open_pool: OpenPool, learner: Learner, tmp_path: Path) -> None:
    """A lost engine costs no rank: every engine loads the copy in memory."""
    victim = tmp_path / "pid"
    direct = ShardedWeightTransfer(CallTransfer(on_push=kill_once(victim)))
    pool = open_pool(SummingEngine, engines=2, transport=WeightTransport(SharedMemory(), direct))
    victim.write_text(str(pool.supervisor.engine_pids[1]))
    before = learner.ranks.process_ids
    push(pool, learner, 1)
    pool.supervisor.wait_for_all_engines()
    assert arrivals(pool) == ["copy", "copy"]
    assert [scores[0] for scores in pool.score([[1, 2]]).values()] == [sums(learner)] * 2
    push(pool, learner, 2)
    assert arrivals(pool) == ["direct", "direct"]
    assert learner.ranks.process_ids == before


@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_vllms_own_transfer(open_pool: OpenPool, ranks: Ranks, model: str, tmp_path: Path) -> None:
    """vLLM engines score and sample with the ranks' weights.

    Only the transfer of bytes through a GPU is replaced.
    """
    from tests.rollout.mapped_backend import MAPPED_BACKEND, MappedTransfer, start_engine

    settings = replace(tiny_settings(Path(model)), weight_transfer=MAPPED_BACKEND)
    transport = WeightTransport(SharedMemory(), ShardedWeightTransfer(MappedTransfer(MAPPED_BACKEND, timeout=600)))
    pool = open_pool(lambda: start_engine(settings), transport=transport)
    sequences = [list(range(3, 83)), list(range(90, 140))]
    other = tmp_path / "other"
    tall_llama(tied=True, seed=1).save_pretrained(other)
    for version, folder in ((1, model), (2, str(other))):
        learner = ranked_learner(ranks, config_of(folder, 2), tmp_path)
        push(pool, learner, version)
        (scores,) = pool.score(sequences).values()
        for found, expected in zip(scores.log_probs, learner.score(sequences), strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
    completions = generate(pool, make_requests(2))
    assert all(set(one.policy_versions) == {2} for one in completions[0].completions)


class FailingTransfer(CallTransfer):
    def push(self, weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        raise ValueError("a fault of the sender's own")


def test_another_failure_names_the_rank(open_pool: OpenPool, local_ray: None, model: str, tmp_path: Path) -> None:
    own_ranks = two_ranks()
    learner = ranked_learner(own_ranks, config_of(model, 2), tmp_path)
    pool = open_pool(SummingEngine, transport=WeightTransport(SharedMemory(), ShardedWeightTransfer(FailingTransfer())))
    with pytest.raises(RankLost, match=r"a fault of the sender's own[\s\S]*learner rank 0 \(CPU\) failed"):
        push(pool, learner, 1)
    own_ranks.close()
