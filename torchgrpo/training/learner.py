"""What a learner does, whoever computes it: one process (`local_learner.py`), or ranks (`ranked_learner.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from config.schema.errors import RunError
from envs.group import Group
from torchgrpo.training.batch import Batch

if TYPE_CHECKING:  # Ray costs a second, which a learner in this process need not wait for
    from torchgrpo.training.published_weights import PolicyTensor
    from torchgrpo.training.ranks import Ranks
    from torchgrpo.training.tensor_stream import RankTensor


class NonFiniteError(RunError):
    """Too many optimizer steps in a row had a non-finite loss or gradient."""


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did.

    metrics: ready to log. log_ratio, entropy: float32 [N, R] of the batch, 0 outside the loss: trainer less engine
    before the update, and the entropy of the trainer's distribution, in nats. advantage: float32 [N, 1] or [N, R], with
    which it was trained on: the reward's by `policy.reward_coef`, and a teacher's.
    """

    metrics: dict[str, float]
    skipped: bool
    log_ratio: Tensor
    entropy: Tensor
    advantage: Tensor


class Learner(Protocol):
    """Owns the policy and its optimizer. Its model is built inside; nobody else reaches for it."""

    @property
    def optimizer_steps(self) -> int:
        """Made so far, skipped ones included."""
        ...

    def credit(self, groups: Sequence[Group], policy_version: int | None = None) -> Batch:
        """The batch of judged groups with all that the objective reads: advantages, masks, reference log-probs.

        policy_version: of the weights that train on it, where they may be newer than those that drew it.
        """
        ...

    def begin_scoring(self, group: Group) -> None:
        """Begin to score a group for a later `credit`, where there are scorers; from any thread."""
        ...

    def drop_scores(self, groups: Sequence[Group]) -> None:
        """Forget the scores of groups that no `credit` will hold."""
        ...

    def step(self, batch: Batch) -> StepReport:
        """Update from whole groups of a credited batch; NonFiniteError after `train.max_nonfinite_steps` in a row."""
        ...

    def publish(self) -> "Sequence[PolicyTensor] | Sequence[RankTensor]":
        """Every tensor of the policy that a push carries, in the dtype in which it leaves."""
        ...

    @property
    def ranks(self) -> "Ranks | None":
        """The processes that the learner is shared out over; None where it is in this one."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of all tokens but the first, [count][length - 1]."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def save(self, folder: Path) -> Callable[[], None]:
        """Begin to write every tensor that training has changed into `folder`, as it is now.

        With `train.async_checkpoint` steps may follow at once: what is written is a copy. The returned function ends
        when all of it is on disk and raises what went wrong; it is to be called once, from any thread.
        """
        ...

    def numbers(self) -> dict[str, Any]:
        """What belongs to these tensors and is none; what the config says is the config's."""
        ...

    def load(self, folder: Path, numbers: dict[str, Any]) -> None:
        """Take up what `save` wrote and `numbers` gave, by however many processes.

        Raises:
            ConfigError: they are of another model; nothing has been loaded.
        """
        ...

    def release_memory(self) -> None:
        """Engines wake on the learner's GPUs: they get what it keeps there and does not use."""
        ...

    def close(self) -> None:
        """End the processes that it has started."""
        ...
