"""The learner as a group of ranks: each has a shard of every parameter and works on a share of every batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from config.schema.config import Config
from torchgrpo.cluster.runtime import Place
from torchgrpo.plan.plan import Plan
from torchgrpo.training.batch import Batch
from torchgrpo.training.local_learner import start_scorers
from torchgrpo.training.rank_host import RankHost
from torchgrpo.training.ranks import LOADING, Ranks, RankSettings
from torchgrpo.training.scorers import Scorers
from torchgrpo.training.split_learner import SplitLearner
from torchgrpo.training.tensor_stream import RankTensor, TensorStream
from torchgrpo.training.worker import Part, Piece, Update, merge_parts


def make_learner(
    config: Config,
    plan: Plan,
    run_dir: Path,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> "RankedLearner":
    """The learner of a run with several ranks, where the plan has them.

    Raises:
        ConfigError: there is no room for the ranks, or their model cannot be loaded.
        RankLost: a rank does not start; everything already started is taken down.
    """
    with ExitStack() as made:
        ranks = Ranks(rank_places(plan), rank_settings(config, plan), RankHost)
        made.callback(ranks.close)
        ranks.start()
        scorers = start_scorers(config, plan, made)
        learner = RankedLearner(config, plan, ranks, run_dir, tell, scorers)
        if scorers is not None:
            scorers.wait_ready()
        made.pop_all()
    return learner


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


class RankedLearner(SplitLearner):
    """A `Learner` whose workers are ranks; this process holds no model.

    Args:
        ranks: which have met; they are this learner's to close.
        The others: see `SplitLearner`.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        ranks: Ranks,
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
        scorers: Scorers | None = None,
    ) -> None:
        self.ranks = ranks
        ranks.answers(ranks.begin_same("build", config, plan), "its model", patience=LOADING)
        reference = plan.reference.home not in ("none", "own devices")
        packs = bool(self._same("packs"))
        super().__init__(config, run_dir, plan.devices.ranks, packs, reference, scorers, tell)
        self._stream = TensorStream(ranks)

    @property
    def vocab_size(self) -> int:
        return int(self._same("vocab_size"))

    def publish(self) -> list[RankTensor]:
        """As `Learner.publish`; a tensor is gathered from its shards when it is asked for."""
        self._stream.forget()
        return self._stream.tensors

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        scores: list[list[float]] = self._same("score", sequences, temperature)
        return scores

    def save(self, folder: Path) -> Callable[[], None]:
        """As `Learner.save`; every rank writes its shards."""
        self._same("begin_save", folder)
        calls = self.ranks.begin_same("end_save")

        def wait() -> None:
            self.ranks.answers(calls, f"its part of the checkpoint in {folder}")

        return wait

    def numbers(self) -> dict[str, Any]:
        """As `Learner.numbers`."""
        numbers: dict[str, Any] = self._same("numbers")
        return numbers | self.counters()

    def load(self, folder: Path, numbers: dict[str, Any]) -> None:
        """As `Learner.load`; every rank reads its shards, however many wrote them."""
        self._same("load", folder, numbers)
        self.count_from(numbers)

    def release_memory(self) -> None:
        """As `Learner.release_memory`, of every rank's GPU."""
        self._same("release_memory")

    def close(self) -> None:
        """As `Learner.close`."""
        with ExitStack() as ending:
            ending.callback(self.ranks.close)
            if self.scorers is not None:
                ending.callback(self.scorers.close)

    def _same(self, method: str, *arguments: Any) -> Any:
        """What rank 0 answers to a call that all ranks take part in."""
        return self.ranks.answers(self.ranks.begin_same(method, *arguments), method)[0]

    def _each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        calls = self.ranks.begin(method, [(share,) for share in shares])
        return self.ranks.answers(calls, method, patience=1 + max(map(len, shares)))

    def _gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        begun = self.ranks.begin_same("begin_step")
        calls = [self.ranks.begin("gradients", [([piece],) for piece in pieces]) for pieces in rounds]
        self.ranks.answers(begun, "begin_step")
        parts = [self.ranks.answers(each, "gradients", patience=1 + len(calls)) for each in calls]
        return [merge_parts(own) for own in zip(*parts, strict=True)]

    def _update(self) -> Update:
        update: Update = self._same("update")
        return update

    def _log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("log_prob", shares)

    def _scores(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("scores", shares)

    def _reference_log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("reference_log_prob", shares)
