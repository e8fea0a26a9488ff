"""The `rollouts` section: what `run=rollouts` shows of a run's ledger."""

from dataclasses import dataclass

from config.schema.values import at_least, one_of


@dataclass
class RolloutsConfig:
    """What `run=rollouts` shows. Settings narrow it down together; what is unset takes all."""

    set: str | None = None
    """`train`, or the name of an evaluation's set."""
    step: int | None = None
    """Groups that this optimizer step trained on."""
    iteration: int | None = None
    """Groups of this iteration, or of the evaluation after it."""
    row: int | None = None
    """The index of the example in its data set."""
    prompt: str | None = None
    """The id of a prompt, or how it begins: the same in every run that has the same messages."""
    outcome: str | None = None
    """Completions that were `right` or `wrong`, `scored`, `invalid`, or could not be judged (`error`)."""
    contains: str | None = None
    """Completions with this text in them, or in their prompt."""
    best: int | None = None
    """So many groups, those of the highest mean reward."""
    worst: int | None = None
    """So many groups, those of the lowest mean reward."""
    flipped: bool = False
    """Prompts that were solved the first time and not the last, or the other way round: both groups of each. Solved
    means half of the completions."""
    limit: int = 10
    """Groups that are printed at most; 0 prints all. A file of `rollouts.to` holds all."""
    to: str | None = None
    """A file instead of the screen, one row a completion: its name ends in .csv, .jsonl or .parquet."""

    def __post_init__(self) -> None:
        if self.outcome is not None:
            one_of("rollouts.outcome", self.outcome, ("right", "wrong", "scored", "invalid", "error"))
        for key in ("best", "worst"):
            at_least(f"rollouts.{key}", vars(self)[key], 1)
        at_least("rollouts.limit", self.limit, 0)
        if self.to is not None:
            one_of("rollouts.to", "." + self.to.rpartition(".")[2], (".csv", ".jsonl", ".parquet"))
