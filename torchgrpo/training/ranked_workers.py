"""Workers of a learner as ranks: each has a shard of every parameter and works on a share of every batch."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from config.schema.config import Config
from torchgrpo.cluster.runtime import Place
from torchgrpo.plan.plan import Plan
from torchgrpo.training.rank_actor import RankActor
from torchgrpo.training.ranks import LOADING, Ranks, RankSettings
from torchgrpo.training.tensor_stream import RankTensor, TensorStream
from torchgrpo.training.worker import Part, Piece, merge_parts


def start_ranks(config: Config, plan: Plan) -> Ranks:
    """The ranks of a plan, which have met and hold no model yet.

    Raises:
        ConfigError: there is no room for the ranks.
        RankLost: a rank does not start; everything already started is taken down.
    """
    ranks = Ranks(rank_places(plan), rank_settings(config, plan), RankActor)
    ranks.start()
    return ranks


def rank_places(plan: Plan) -> list[Place]:
    """Where each rank lives; on a cluster Ray chooses its GPU."""
    devices = plan.devices
    names = [f"learner rank {number}" for number in range(devices.ranks)]
    if devices.on_cpu:
        return [Place(name) for name in names]
    if devices.on_cluster:
        return [Place(name, num_gpus=1) for name in names]
    return [
        Place(name, plan.machine.physical((gpu,))) for name, gpu in zip(names, devices.train, strict=True)
    ]


def rank_settings(config: Config, plan: Plan) -> RankSettings:
    """How the ranks of a plan are started and watched."""
    return RankSettings(
        nodes=config.train_model.num_nodes,
        ray_cpus=plan.ray_cpus,
        on_gpu=not plan.devices.on_cpu,
        timeout_s=config.train.wait_timeout_s,
        address=config.ray.address,
        asked=f"train_model.num_devices={plan.devices.ranks}, train_model.num_nodes={config.train_model.num_nodes}",
    )


class RankedWorkers:
    """Ranks as `Workers`; this process holds no model.

    Args:
        ranks: which have met; they are closed with these workers.

    Raises:
        ConfigError: their model cannot be loaded.
    """

    def __init__(self, config: Config, plan: Plan, ranks: Ranks) -> None:
        self.ranks: Ranks | None = ranks
        self._ranks = ranks
        ranks.answers(ranks.begin_same("build", config, plan), "its model", patience=LOADING)
        self.count = plan.devices.ranks
        self.has_reference = plan.reference.home not in ("none", "own devices")
        self.packs = bool(self.call_all("packs"))
        self.vocab_size = int(self.call_all("vocab_size"))
        self._stream = TensorStream(ranks)

    def call_all(self, method: str, *arguments: Any) -> Any:
        return self._ranks.answers(self._ranks.begin_same(method, *arguments), method)[0]

    def call_each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        calls = self._ranks.begin(method, [(share,) for share in shares])
        return self._ranks.answers(calls, method, patience=1 + max(map(len, shares)))

    def gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        begun = self._ranks.begin_same("begin_step")
        calls = [self._ranks.begin("gradients", [([piece],) for piece in pieces]) for pieces in rounds]
        self._ranks.answers(begun, "begin_step")
        parts = [self._ranks.answers(each, "gradients", patience=1 + len(calls)) for each in calls]
        return [merge_parts(own) for own in zip(*parts, strict=True)]

    def publish(self) -> list[RankTensor]:
        """A tensor is gathered from its shards when it is asked for."""
        self._stream.forget()
        return self._stream.tensors

    def save(self, folder: Path) -> Callable[[], None]:
        """Every rank writes its shards."""
        self.call_all("begin_save", folder)
        calls = self._ranks.begin_same("end_save")

        def wait() -> None:
            self._ranks.answers(calls, f"its part of the checkpoint in {folder}")

        return wait

    def close(self) -> None:
        self._ranks.close()
