"""Which member of a mixture the next prompt comes from: as evenly as whole prompts allow, by shares."""

from collections.abc import Mapping
from typing import Any

from config.schema.curriculum import CurriculumConfig
from envs.curriculum.member import Member
from envs.curriculum.worth_of_success import RULES, shares


class FixedWeights:
    """The member that is furthest behind its share of all draws."""

    def __init__(self, members: Mapping[str, Member], weights: Mapping[str, float]) -> None:
        self.members, self.weights = members, weights

    def next(self) -> str:
        """Name of the member that is drawn from next."""
        return min(self.members, key=lambda name: ((self.members[name].drawn + 1) / self.weights[name], name))

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        """Nothing to restore: the members' state holds the counts of draws."""


class WeightsBySuccess:
    """Weights that follow each member's recent success.

    With every draw a member is owed its present share, and the one that is owed most is drawn from. So counts stay
    within a prompt or so of the sum of the shares, however those change.
    """

    def __init__(
        self, members: Mapping[str, Member], weights: Mapping[str, float], config: CurriculumConfig
    ) -> None:
        assert config.sources is not None
        self.members, self.weights = members, weights
        self.worth, self.floor, self.prior = RULES[config.sources], config.floor, config.prior
        self.owed = dict.fromkeys(members, 0.0)

    def shares(self) -> dict[str, float]:
        """Shares of the next draws by member; they sum to 1."""
        success = {name: member.success.mean for name, member in self.members.items()}
        worth = {name: self.worth(self.prior if mean is None else mean) for name, mean in success.items()}
        return shares(self.weights, worth, self.floor)

    def next(self) -> str:
        for name, share in self.shares().items():
            self.owed[name] += share
        chosen = min(self.owed, key=lambda name: (-self.owed[name], name))
        self.owed[chosen] -= 1
        return chosen

    def metrics(self) -> dict[str, float]:
        found = {f"curriculum/weight/{name}": share for name, share in self.shares().items()}
        means = {name: member.success.mean for name, member in self.members.items()}
        known = {name: mean for name, mean in means.items() if mean is not None}
        return found | {f"curriculum/success/{name}": mean for name, mean in known.items()}

    def state(self) -> Any:
        return dict(self.owed)

    def load(self, state: Any) -> None:
        self.owed = dict.fromkeys(self.members, 0.0) | dict(state or {})


Sources = FixedWeights | WeightsBySuccess
