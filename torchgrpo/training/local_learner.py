"""The learner in one process: its one worker is here, at no cost."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from config.schema.config import Config
from torchgrpo.plan.plan import Plan
from torchgrpo.training.batch import Batch
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.learner_models import Models, load_base, make_models
from torchgrpo.training.process import release_memory
from torchgrpo.training.published_weights import PolicyTensor, pushed_tensors
from torchgrpo.training.split_learner import SplitLearner
from torchgrpo.training.worker import Part, Piece, Update, Worker

if TYPE_CHECKING:  # Ray costs a second, which a run without scorers need not wait for
    from torchgrpo.training.scorers import Scorers


def make_learner(
    config: Config,
    plan: Plan,
    run_dir: Path,
    tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> "LocalLearner":
    """The learner of a run, with the models of `config` where the plan has them; its arguments as `LocalLearner`'s."""
    with ExitStack() as made:
        scorers = start_scorers(config, plan, made)
        models = make_models(config, load_base(config, plan), plan)
        check_forward(models.scorer, plan.weight_check.prompts, plan.weight_check.learner)
        if scorers is not None:
            scorers.wait_ready()
        learner = LocalLearner(config, models, pushed_tensors(config, plan), run_dir, tell, scorers)
        made.pop_all()
    return learner


def start_scorers(config: Config, plan: Plan, made: ExitStack) -> "Scorers | None":
    """Start the scorers of a plan, if it has some; they load while the learner does.

    made: closes them where the learner cannot be made.
    """
    if plan.reference.home != "own devices":
        return None
    from torchgrpo.training.scorers import Scorers

    scorers = Scorers(config, plan)
    made.callback(scorers.close)
    return scorers


class LocalLearner(SplitLearner):
    """A `Learner` whose worker is in this process. Its arguments: see `Worker` and `SplitLearner`."""

    def __init__(
        self,
        config: Config,
        models: Models,
        pushed: Callable[[Any], list[PolicyTensor]],
        run_dir: Path,
        tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
        scorers: "Scorers | None" = None,
    ) -> None:
        self.worker = Worker(config, models, pushed)
        reference = models.reference is not None
        super().__init__(config, run_dir, 1, self.worker.scorer.packs, reference, scorers, tell)

    @property
    def vocab_size(self) -> int:
        return self.worker.vocab_size

    @property
    def ranks(self) -> None:
        return None

    def publish(self) -> list[PolicyTensor]:
        return self.worker.publish()

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return self.worker.score(sequences, temperature)

    def save(self, folder: Path) -> Callable[[], None]:
        """As `Learner.save`."""
        return self.worker.save(folder)

    def numbers(self) -> dict[str, Any]:
        """As `Learner.numbers`."""
        return self.worker.numbers() | self.counters()

    def load(self, folder: Path, numbers: dict[str, Any]) -> None:
        """As `Learner.load`."""
        self.worker.load(folder, numbers)
        self.count_from(numbers)

    def release_memory(self) -> None:
        """As `Learner.release_memory`."""
        release_memory()

    def close(self) -> None:
        """End the scorers, where there are some."""
        if self.scorers is not None:
            self.scorers.close()

    def _gradients(self, rounds: Iterator[list[Piece]]) -> list[Part]:
        self.worker.begin_step()
        return [self.worker.gradients(piece for (piece,) in rounds)]

    def _update(self) -> Update:
        return self.worker.update()

    def _log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return [self.worker.log_prob(shares[0])]

    def _scores(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return [self.worker.scores(shares[0])]

    def _reference_log_prob(self, shares: list[list[Batch]]) -> list[list[Tensor]]:
        return [self.worker.reference_log_prob(shares[0])]
