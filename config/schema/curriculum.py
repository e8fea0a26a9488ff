"""The `env.curriculum` section: which prompts are asked when, by their difficulty and by how well they go."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from config.schema.errors import ConfigError
from config.schema.values import at_least, check_fields, is_share, one_of

BY_SUCCESS = ("learnability", "failure")
"""Rules by which success draws: a small function each, in envs/curriculum/worth_of_success.py."""


@dataclass
class CurriculumConfig:
    """Which prompts are asked when. The defaults ask every prompt once an epoch, whatever became of it."""

    column: Any = None
    """Column of the rows that says how hard they are: its values are levels, which open one after the other. In a
    mixture also {MEMBER: column}, for the members that have one. Unset: all rows are open."""
    order: Any = "ascending"
    """Of the levels: `ascending` (a larger number is harder), `descending` (a pass rate), or a list of the column's
    values, easiest first."""
    bins: int | None = None
    """Levels of about equally many rows, made of the column's values. Unset: every value is a level."""
    open: str = "reached"
    """Levels that are drawn from: all that were `reached`, or the `newest` one alone."""
    gate: float = 0.7
    """Recent success rate of the newest level at which the next one opens."""
    window: int = 64
    """Groups that a recent success rate, of a level or of a source, is the mean of. No gate opens before as many."""
    priority: str | None = None
    """Draws prompts by their own recent success p, in place of each once an epoch: `learnability`, in proportion to
    p (1 - p), or `failure`, to 1 - p."""
    sources: str | None = None
    """The same for the members of a mixture, by the recent success of each: its weight in `env.mixture` times
    p (1 - p), or times 1 - p. Unset: the weights stay."""
    floor: float = 0.1
    """Share of the draws on which success has no say: every prompt, and every source, keeps this part of what it would
    have without."""
    prior: float = 0.5
    """Success that a prompt, or a source, is taken to have before it was asked."""
    memory: float = 0.2
    """What a prompt's recent success keeps of its value with every new group; 0: only the newest group counts."""
    replay: float = 0.0
    """Share of the draws that ask a solved prompt again."""
    solved: float = 1.0
    """Success of a group from which on its prompt counts as solved."""

    def __post_init__(self) -> None:
        shares = ("gate", "floor", "prior", "memory", "solved")
        check_fields("env.curriculum", self, shares, is_share, "a share, 0 to 1")
        check_fields("env.curriculum", self, ("replay",), lambda part: 0 <= part < 1, "a share, 0 to below 1")
        at_least("env.curriculum.window", self.window, 1)
        at_least("env.curriculum.bins", self.bins, 2)
        one_of("env.curriculum.open", self.open, ("reached", "newest"))
        for key in ("priority", "sources"):
            if vars(self)[key] is not None:
                one_of(f"env.curriculum.{key}", vars(self)[key], BY_SUCCESS)
        column, order = self.column, self.order
        names = list(column.values()) if isinstance(column, Mapping) else [] if column is None else [column]
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"env.curriculum.column={column!r}: the name of a column, or {{MEMBER: column}} in a mixture"
            )
        if isinstance(order, list):
            if not order or any(order.count(value) > 1 for value in order):
                raise ConfigError(
                    f"env.curriculum.order={order!r}: the values of the column, easiest first, each once"
                )
            if self.bins is not None:
                raise ConfigError(
                    f"env.curriculum.bins={self.bins}: a list of values (env.curriculum.order={order!r}) names the "
                    "levels; leave one of the two out"
                )
        else:
            one_of("env.curriculum.order", order, ("ascending", "descending", "[VALUE, ...]"))
        if self.bins is not None and not names:
            raise ConfigError(
                f"env.curriculum.bins={self.bins} makes levels of a column: set env.curriculum.column"
            )

    def check_against(self, dataset: str, mixture: Mapping[str, Any], passes_over: bool) -> None:
        """passes_over: `env.difficulty` leaves prompts out. Raises ConfigError for what the data cannot have."""
        mixed = dataset == "mixture"
        if self.sources is not None and not mixed:
            raise ConfigError(
                f"env.curriculum.sources={self.sources} weighs the members of a mixture, and env.dataset={dataset} is "
                "none: set env.dataset=mixture and env.mixture, or leave it out"
            )
        if isinstance(self.column, Mapping):
            unknown = sorted(set(self.column) - set(mixture)) if mixed else sorted(self.column)
            if unknown:
                raise ConfigError(
                    f"env.curriculum.column={dict(self.column)!r}: {unknown[0]} is no member of env.mixture; give the "
                    f"name of the column{', or members of ' + ', '.join(mixture) if mixed else ''}"
                )
        if self.priority is not None and passes_over:
            raise ConfigError(
                f"env.curriculum.priority={self.priority} and env.difficulty both choose prompts by their recent "
                "success: leave one of the two at its default"
            )

    def of_member(self, name: str) -> "CurriculumConfig":
        """What a member of a mixture is to know of it: the column that its rows must have."""
        column = self.column.get(name) if isinstance(self.column, Mapping) else self.column
        return replace(CurriculumConfig(), column=column)
