"""Real ranks send their weights straight to real engines: in Ray actors, with the driver out of the way."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.errors import RankLost
from tests.rollout.conftest import OpenPool, open_pool, requests, tiny_settings
from tests.rollout.conftest import tiny_llama as tall_llama
from tests.rollout.pool_engines import CountingEngine, HandCarried
from tests.training.test_ranks import config_of, over, two_ranks, weights
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import generate
from torchgrpo.rollout.engines.pool import RayPool
from torchgrpo.rollout.weights.from_ranks import TransferFromRanks
from torchgrpo.rollout.weights.host_copy import Transport
from torchgrpo.rollout.weights.outgoing import Engines, Outgoing
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.learner import Learner
from torchgrpo.training.ranks import Ranks

pytestmark = pytest.mark.long

__all__ = ["open_pool"]


@pytest.fixture(scope="module")
def ranks(local_ray: None) -> Iterator[Ranks]:
    there = two_ranks()
    yield there
    there.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tall_llama(tied=True).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def learner(ranks: Ranks, model: str, tmp_path: Path) -> Learner:
    return over(ranks, config_of(model, 2), tmp_path)


class Keeping(CountingEngine):
    """Scores are the sums of what it holds, by name in the order of the alphabet."""

    def score(self, sequences: object) -> dict[str, list[list[float]]]:
        return {"": [[float(self.weights[name].sum()) for name in sorted(self.weights)]]}


def kill_once(victim: Path) -> Callable[[int], None]:
    def kill(version: int) -> None:
        if victim.exists():
            os.kill(int(victim.read_text()), signal.SIGKILL)
            victim.unlink()

    return kill


def pushed(pool: RayPool, learner: Learner, version: int) -> None:
    pool.load(Outgoing(learner.publish(), learner.ranks), version)


def ways(pool: RayPool) -> list[str]:
    return pool.supervisor.call_each("came_by", [{}] * len(pool.supervisor.members))


def sums(learner: Learner) -> list[float]:
    made = weights(learner)
    return [float(made[name].sum()) for name in sorted(made)]


def test_every_tensor_arrives(open_pool: OpenPool, learner: Learner) -> None:
    direct = TransferFromRanks(HandCarried())
    pool = open_pool(Keeping, engines=2, transport=Transport(SharedMemory(), direct))
    for version in (1, 2):
        pushed(pool, learner, version)
        assert ways(pool) == ["direct", "direct"]
        assert [scores[0] for scores in pool.score([[1, 2]]).values()] == [sums(learner)] * 2


def test_an_engine_lost_in_a_push_costs_no_rank(
    open_pool: OpenPool, learner: Learner, tmp_path: Path
) -> None:
    """Rank 0 finds out; all ranks go on, and every engine loads the copy in memory."""
    victim = tmp_path / "pid"
    direct = TransferFromRanks(HandCarried(before=kill_once(victim)))
    pool = open_pool(Keeping, engines=2, transport=Transport(SharedMemory(), direct))
    victim.write_text(str(pool.supervisor.members[1]))
    before = learner.ranks.process_ids
    pushed(pool, learner, 1)
    pool.supervisor.wait_for_every()
    assert ways(pool) == ["copy", "copy"]
    assert [scores[0] for scores in pool.score([[1, 2]]).values()] == [sums(learner)] * 2
    pushed(pool, learner, 2)
    assert ways(pool) == ["direct", "direct"]
    assert learner.ranks.process_ids == before


@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
def test_vllms_own_transfer(open_pool: OpenPool, ranks: Ranks, model: str, tmp_path: Path) -> None:
    """All but the bytes' way through a GPU is vLLM's: the engine scores and draws with what the ranks hold."""
    from tests.rollout.mapped_backend import MAPPED, MappedTransfer, start_engine

    settings = replace(tiny_settings(Path(model)), weight_transfer=MAPPED)
    transport = Transport(SharedMemory(), TransferFromRanks(MappedTransfer(MAPPED, timeout=600)))
    pool = open_pool(lambda: start_engine(settings), transport=transport)
    sequences = [list(range(3, 83)), list(range(90, 140))]
    other = tmp_path / "other"
    tall_llama(tied=True, seed=1).save_pretrained(other)
    for version, folder in ((1, model), (2, str(other))):
        learner = over(ranks, config_of(folder, 2), tmp_path)
        pushed(pool, learner, version)
        (scores,) = pool.score(sequences).values()
        for found, expected in zip(scores.log_probs, learner.score(sequences), strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=0)
    completions = generate(pool, requests(2))
    assert all(set(one.policy_versions) == {2} for one in completions[0].completions)


class RaisesInRank0(HandCarried):
    def push(self, weights: Outgoing, version: int, engines: Engines) -> None:
        raise ValueError("a fault of the sender's own")


def test_another_failure_names_the_rank(
    open_pool: OpenPool, local_ray: None, model: str, tmp_path: Path
) -> None:
    own = two_ranks()
    learner = over(own, config_of(model, 2), tmp_path)
    pool = open_pool(Keeping, transport=Transport(SharedMemory(), TransferFromRanks(RaisesInRank0())))
    with pytest.raises(RankLost, match=r"a fault of the sender's own[\s\S]*learner rank 0 \(CPU\) failed"):
        pushed(pool, learner, 1)
    own.close()
