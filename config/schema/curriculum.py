"""The `env.curriculum` section: selection of prompts by difficulty and recent success."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from config.schema.errors import ConfigError
from config.schema.values import check_choice, check_fields, check_minimum, is_share

SUCCESS_RULES = ("learnability", "failure")
"""Names of the priority rules; envs/curriculum/priorities.py has a function for each."""


@dataclass
class CurriculumConfig:
    """Selection of prompts by difficulty and recent success.

    With the defaults, each prompt is sampled once per epoch, whatever its success.
    """

    column: Any = None
    """Column with the difficulty of the rows: its values are levels, which open one after the other. In a
    mixture also {MEMBER: column}, for the members with such a column. Unset: all rows are open."""
    order: Any = "ascending"
    """Order of the levels: `ascending` (a larger number is harder), `descending` (as for a pass rate), or a
    list of the column's values, easiest first."""
    bins: int | None = None
    """Number of levels of about equally many rows, formed from the column's values. Unset: every value is a
    level."""
    open: str = "reached"
    """Levels to sample from: all levels that are open (`reached`), or only the `newest` one."""
    gate: float = 0.7
    """Recent success rate of the newest level at which the next level opens."""
    window: int = 64
    """Number of groups in the mean that is the recent success rate of a level or a source. No level opens
    before this number of groups."""
    priority: str | None = None
    """Samples prompts by their recent success p, instead of each prompt once per epoch: `learnability` in
    proportion to p (1 - p), `failure` in proportion to 1 - p."""
    sources: str | None = None
    """Samples the members of a mixture by the recent success p of each: `learnability` multiplies the weight in
    `env.mixture` by p (1 - p), `failure` by 1 - p. Unset: constant weights."""
    floor: float = 0.1
    """Share of the samples that ignores success: every prompt, and every source, keeps this fraction of its
    share without priorities."""
    prior: float = 0.5
    """Assumed success of a prompt or a source before its first group."""
    memory: float = 0.2
    """Factor on the previous value of a prompt's recent success at every new group; 0: only the newest group
    counts."""
    replay: float = 0.0
    """Share of the samples that repeat a solved prompt."""
    solved: float = 1.0
    """Minimum success of a group at which its prompt counts as solved."""

    def __post_init__(self) -> None:
        shares = ("gate", "floor", "prior", "memory", "solved")
        check_fields("env.curriculum", self, shares, is_share, "must be a share from 0 to 1")
        check_fields(
            "env.curriculum", self, ("replay",), lambda part: 0 <= part < 1, "must be a share from 0 to below 1"
        )
        check_minimum("env.curriculum.window", self.window, 1)
        check_minimum("env.curriculum.bins", self.bins, 2)
        check_choice("env.curriculum.open", self.open, ("reached", "newest"))
        for key in ("priority", "sources"):
            if vars(self)[key] is not None:
                check_choice(f"env.curriculum.{key}", vars(self)[key], SUCCESS_RULES)
        column, order = self.column, self.order
        names = list(column.values()) if isinstance(column, Mapping) else [] if column is None else [column]
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"env.curriculum.column={column!r}: not the name of a column; set a column name, or "
                "{MEMBER: column} in a mixture"
            )
        if isinstance(order, list):
            if not order or any(order.count(value) > 1 for value in order):
                raise ConfigError(
                    f"env.curriculum.order={order!r}: the list is empty or repeats a value; list the values "
                    "of the column, easiest first, each once"
                )
            if self.bins is not None:
                raise ConfigError(
                    f"env.curriculum.bins={self.bins}: env.curriculum.order={order!r} already lists the "
                    "levels; remove one of the two settings"
                )
        else:
            check_choice("env.curriculum.order", order, ("ascending", "descending", "[VALUE, ...]"))
        if self.bins is not None and not names:
            raise ConfigError(
                f"env.curriculum.bins={self.bins}: there is no column to make levels from; set env.curriculum.column"
            )

    def check_data(self, dataset: str, mixture: Mapping[str, Any], skips_prompts: bool) -> None:
        """Raises ConfigError for settings that contradict the data.

        skips_prompts: whether `env.difficulty` skips prompts.
        """
        mixed = dataset == "mixture"
        if self.sources is not None and not mixed:
            raise ConfigError(
                f"env.curriculum.sources={self.sources}: only the members of a mixture have weights, and "
                f"env.dataset={dataset} is not a mixture; set env.dataset=mixture and env.mixture, or remove "
                "env.curriculum.sources"
            )
        if isinstance(self.column, Mapping):
            unknown = sorted(set(self.column) - set(mixture)) if mixed else sorted(self.column)
            if unknown:
                raise ConfigError(
                    f"env.curriculum.column={dict(self.column)!r}: {unknown[0]} is not a member of "
                    "env.mixture; set the name of the "
                    f"column{', or members of ' + ', '.join(mixture) if mixed else ''}"
                )
        if self.priority is not None and skips_prompts:
            raise ConfigError(
                f"env.curriculum.priority={self.priority} and env.difficulty both choose prompts by their recent "
                "success: leave one of the two at its default"
            )

    def member_config(self, name: str) -> "CurriculumConfig":
        """Returns the curriculum of a mixture's member, which has only the column of its rows."""
        column = self.column.get(name) if isinstance(self.column, Mapping) else self.column
        return replace(CurriculumConfig(), column=column)
