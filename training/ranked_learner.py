"""The learner as a group of ranks: each has a shard of every parameter and works on a share of every batch."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.calls import Reference
from cluster.runtime import Place
from config.schema import Config
from plan.plan import Plan
from training.batch import Batch
from training.rank_host import Described, aligned
from training.ranks import Ranks, RankSettings
from training.split_learner import SplitLearner
from training.worker import Part, Piece, Update


@dataclass(frozen=True)
class RankTensor:
    """A `rollout.weights.outgoing.PublishedTensor` that the ranks gather when it is asked for."""

    described: Described
    stream: "TensorStream"
    index: int

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.described.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.described.dtype

    @property
    def device(self) -> torch.device:
        """Where it arrives."""
        return torch.device("cpu")

    @property
    def identity(self) -> Hashable:
        return self.described.identity

    @property
    def constant(self) -> Hashable:
        return self.described.constant

    def make(self) -> Tensor:
        """The whole tensor, to be read only."""
        return self.stream.tensor(self.index).view(self.dtype).view(self.shape)


class TensorStream:
    """Whole tensors, some at a time; the ranks gather the next ones while these are written.

    Two names of one tensor are one tensor here.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        described: list[Described] = ranks.answers(ranks.begin_same("describe"), "the names of its tensors")[
            0
        ]
        self.tensors = [RankTensor(one, self, index) for index, one in enumerate(described)]
        self._blocks, self._places = _blocks(described)
        self._ahead: tuple[int, list[Reference]] | None = None
        self._here: tuple[int, Tensor] | None = None

    def tensor(self, index: int) -> Tensor:
        """The bytes of tensor `index`."""
        number, begins = self._places[index]
        if self._here is None or self._here[0] != number:
            self._here = number, self._taken(number)
        described = self.tensors[index].described
        return self._here[1][begins : begins + described.nbytes]

    def forget(self) -> None:
        """What was gathered is of weights that may have changed since."""
        self._ahead = self._here = None

    def _taken(self, number: int) -> Tensor:
        begun, calls = self._ahead or (number, self._gather(number))
        if begun != number:
            calls = self._gather(number)
        gathered = self.ranks.answers(calls, "its shards of the tensors of a push")[0]
        later = number + 1
        self._ahead = (later, self._gather(later)) if later < len(self._blocks) else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(gathered)

    def _gather(self, number: int) -> list[Reference]:
        return self.ranks.begin_same("tensors", self._blocks[number])


BLOCK_BYTES = 1 << 26
"""Of tensors that are gathered in one call; a larger one is alone. Twice as much is on rank 0 beside its shards."""


def _blocks(described: Sequence[Described]) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """The indices of the tensors of each block, and of every name its block and the byte at which it begins there."""
    blocks: list[list[int]] = []
    places: dict[int, tuple[int, int]] = {}
    filled = 0
    for index, one in enumerate(described):
        if one.identity in places:
            continue
        if not blocks or filled + one.nbytes > BLOCK_BYTES:
            blocks.append([])
            filled = 0
        places[one.identity] = len(blocks) - 1, filled
        blocks[-1].append(index)
        filled += aligned(one.nbytes)
    return blocks, [places[one.identity] for one in described]


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
    ranks = Ranks(rank_places(plan), rank_settings(config, plan))
    try:
        return RankedLearner(config, plan, ranks, run_dir, tell)
    except BaseException:
        ranks.close()
        raise


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
    )


class RankedLearner(SplitLearner):
    """A `training.learner.Learner` whose workers are ranks; this process holds no model.

    Args:
        ranks: which have met; they are this learner's to close.
        tell: told that a step has begun.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        ranks: Ranks,
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.ranks = ranks
        self.tell = tell
        ranks.answers(ranks.begin_same("build", config, plan), "its model", patience=_LOADING)
        reference_first = plan.reference.home != "none"
        super().__init__(config, run_dir, plan.devices.ranks, bool(self._same("packs")), reference_first)
        self._stream = TensorStream(ranks)

    @property
    def vocab_size(self) -> int:
        return int(self._same("vocab_size"))

    @property
    def tied_head(self) -> str | None:
        name: str | None = self._same("tied_head")
        return name

    def publish(self) -> list[RankTensor]:
        """As `Learner.publish`; a tensor is gathered from its shards when it is asked for."""
        self._stream.forget()
        return self._stream.tensors

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        scores: list[list[float]] = self._same("score", sequences, temperature)
        return scores

    def rounding_error(
        self, sequences: Sequence[Sequence[int]], dtype: str, float8: bool, draws: int = 1
    ) -> list[list[float]]:
        errors: list[list[float]] = self._same("rounding_error", sequences, dtype, float8, draws)
        return errors

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
        self.ranks.close()

    def _same(self, method: str, *arguments: Any) -> Any:
        """What rank 0 answers to a call that all ranks take part in."""
        return self.ranks.answers(self.ranks.begin_same(method, *arguments), method)[0]

    def _each(self, method: str, shares: Sequence[Sequence[Any]]) -> list[Any]:
        calls = self.ranks.begin(method, [(share,) for share in shares])
        return self.ranks.answers(calls, method, patience=1 + max(map(len, shares)))

    def _gradients(self, shares: list[list[Piece]]) -> list[Part]:
        self.tell("optimize", 1, 1)
        return self._each("gradients", shares)

    def _update(self) -> Update:
        update: Update = self._same("update")
        return update

    def _log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("log_prob", shares)

    def _scores(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("scores", shares)

    def _reference_log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return self._each("reference_log_prob", shares)


_LOADING = 3
"""Loading a model may take longer than anything that ranks wait for later."""
