"""Chooses the next data source of a mixture, by fixed or success-dependent weights.

Both classes choose sources as evenly as whole prompts allow: the counts of samples stay close to the shares.
"""

from collections.abc import Mapping
from typing import Any

from config.schema.curriculum import CurriculumConfig
from envs.curriculum.dataset_source import DatasetSource
from envs.curriculum.priorities import PRIORITY_RULES, source_shares


class FixedSourceWeights:
    """Fixed weights: the next source is the one furthest behind its share of samples."""

    def __init__(self, members: Mapping[str, DatasetSource], weights: Mapping[str, float]) -> None:
        self.members, self.weights = members, weights

    def next_source(self) -> str:
        """Returns the name of the source to sample next."""
        return min(self.members, key=lambda name: ((self.members[name].num_sampled + 1) / self.weights[name], name))

    def metrics(self) -> dict[str, float]:
        """Returns no metrics: the weights are constant."""
        return {}

    def state(self) -> Any:
        """Returns None: the sources' own states hold the counts of samples."""
        return None

    def load(self, state: Any) -> None:
        """Restores nothing, as `state` holds nothing."""


class SuccessSourceWeights:
    """Weights that follow the recent success of each data source.

    Every sample adds each source's current share to its deficit. The source with the largest deficit is sampled, and
    its deficit falls by 1. So the counts stay within about one prompt of the summed shares, however the shares change.
    """

    def __init__(
        self, members: Mapping[str, DatasetSource], weights: Mapping[str, float], config: CurriculumConfig
    ) -> None:
        assert config.sources is not None
        self.members, self.weights = members, weights
        self.priority_rule, self.floor, self.prior = (
            PRIORITY_RULES[config.sources], config.floor, config.prior,
        )  # fmt: skip
        self.deficits = dict.fromkeys(members, 0.0)

    def shares(self) -> dict[str, float]:
        """Returns the share of the next samples by source; the shares sum to 1."""
        success = {name: member.success.mean for name, member in self.members.items()}
        priorities = {name: self.priority_rule(self.prior if mean is None else mean) for name, mean in success.items()}
        return source_shares(self.weights, priorities, self.floor)

    def next_source(self) -> str:
        """Returns the name of the source to sample next."""
        for name, share in self.shares().items():
            self.deficits[name] += share
        chosen = min(self.deficits, key=lambda name: (-self.deficits[name], name))
        self.deficits[chosen] -= 1
        return chosen

    def metrics(self) -> dict[str, float]:
        """Returns share and recent success of each source, by metric name."""
        found = {f"curriculum/weight/{name}": share for name, share in self.shares().items()}
        means = {name: member.success.mean for name, member in self.members.items()}
        known = {name: mean for name, mean in means.items() if mean is not None}
        return found | {f"curriculum/success/{name}": mean for name, mean in known.items()}

    def state(self) -> Any:
        """Returns the deficits for a checkpoint."""
        return dict(self.deficits)

    def load(self, state: Any) -> None:
        """Restores the deficits of a checkpoint; new sources begin at 0."""
        self.deficits = dict.fromkeys(self.members, 0.0) | dict(state or {})


SourceWeights = FixedSourceWeights | SuccessSourceWeights
