"""The `rollouts` section: filters of the completions that `run=rollouts` prints."""

from dataclasses import dataclass

from config.schema.values import check_choice, check_minimum


@dataclass
class RolloutsConfig:
    """Filters of the groups and completions that `run=rollouts` prints.

    All filters that are set apply together; an unset filter selects all groups.
    """

    set: str | None = None
    """`train`, or the name of an evaluation set."""
    step: int | None = None
    """Selects the groups of this optimizer step."""
    iteration: int | None = None
    """Selects the groups of this iteration, or of the evaluation after it."""
    row: int | None = None
    """Selects the example with this index in its data set."""
    prompt: str | None = None
    """Selects the prompt with this id, or with an id that starts with this text. Prompts with equal messages
    have equal ids in all runs."""
    outcome: str | None = None
    """Selects completions by their outcome: `right`, `wrong`, `scored`, `invalid`, or `error` (the reward failed)."""
    contains: str | None = None
    """Selects completions that contain this text, also in their prompt."""
    best: int | None = None
    """Selects this many groups with the highest mean reward."""
    worst: int | None = None
    """Selects this many groups with the lowest mean reward."""
    flipped: bool = False
    """Selects prompts that were solved in their first group but not in their last, or the reverse; both groups
    are printed. A group is solved if at least half of its completions are right."""
    limit: int = 10
    """Maximum number of groups to print; 0 prints all. The file `rollouts.to` contains all groups."""
    to: str | None = None
    """Writes a file with one row per completion instead of printing; the name ends in .csv, .jsonl or .parquet."""

    def __post_init__(self) -> None:
        if self.outcome is not None:
            check_choice("rollouts.outcome", self.outcome, ("right", "wrong", "scored", "invalid", "error"))
        for key in ("best", "worst"):
            check_minimum(f"rollouts.{key}", vars(self)[key], 1)
        check_minimum("rollouts.limit", self.limit, 0)
        if self.to is not None:
            check_choice("rollouts.to", "." + self.to.rpartition(".")[2], (".csv", ".jsonl", ".parquet"))
