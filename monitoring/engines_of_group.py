"""Which engines drew a group, by name; for the lanes of the report."""

from collections.abc import Iterable
from typing import Any

Team = tuple[str, ...]
"""The engines that drew a group; those of several turns may be several."""


def team_of(record: dict[str, Any]) -> Team:
    """The engines that drew the group of a line of the ledger."""
    return tuple(sorted({one["engine"] for one in record["completions"]}))


def engine_names(teams: Iterable[Team]) -> list[str]:
    """Every engine once, `engine 2` before `engine 10`."""
    return sorted({name for team in teams for name in team}, key=lambda name: (len(name), name))
