"""The order in which prompts are trained on: every row once an epoch, shuffled by seed and epoch, resumable.

A mixture has one such order per member; which member is next follows from the weights alone, as evenly as whole
prompts allow. Prompts whose recent success rate lies outside `env.difficulty` are passed over for a few epochs.
`env.curriculum` has other ways to choose: levels, success, solved prompts again, weights that follow success
(envs/curriculum/).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from config.schema.errors import ConfigError
from envs.curriculum.member import Member
from envs.curriculum.sources import FixedWeights, Sources, WeightsBySuccess
from envs.data_digest import DataChange
from envs.example import Example, Mixed
from envs.prompt_rows import Rows


class PromptSource:
    """An endless, seeded stream of examples.

    Args:
        examples: one split of a task; several data sets where it is a `Mixed`.
        seed: with what was drawn and observed before it fixes the next example.
        keep: examples it refuses (a prompt over the limit) are left out and counted; asked once a row, when
            the row first comes up.
        difficulty: which success rates are worth training on; see `observe`.
        told: how long prompts are that `keep` all refused, and what else would help, for messages.
        curriculum: which prompts are asked when.
        setting: what names the data, for messages; in a mixture it is the member.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        keep: Callable[[Example], bool],
        difficulty: DifficultyConfig | None = None,
        told: Callable[[Sequence[Example]], tuple[str, str]] | None = None,
        curriculum: CurriculumConfig | None = None,
        setting: str = "env.data_files",
    ) -> None:
        if not len(examples):
            raise ConfigError("the dataset has no rows: check env.data_files, env.split and env.holdout")
        self.examples = examples
        self.rows = Rows(examples, keep, told)
        bounds = examples.bounds if isinstance(examples, Mixed) else {"": (0, len(examples))}
        empty = [name for name, (start, end) in bounds.items() if start == end]
        if empty:
            raise ConfigError(
                f"env.mixture.{empty[0]}: this member has no rows; check its data_files and split"
            )
        config, passing = curriculum or CurriculumConfig(), difficulty or DifficultyConfig()
        columns = config.column
        self.members = {
            name: Member(
                self.rows,
                name,
                f"env.mixture.{name}" if name else setting,
                of_member,
                seed,
                passing,
                replace(config, column=columns.get(name) if isinstance(columns, Mapping) else columns),
            )
            for name, of_member in bounds.items()
        }
        weights = examples.weights if isinstance(examples, Mixed) else {"": 1.0}
        self.sources: Sources = (
            FixedWeights(self.members, weights)
            if config.sources is None
            else WeightsBySuccess(self.members, weights, config)
        )

    @property
    def left_out(self) -> int:
        """Rows met so far that `keep` refused."""
        return len(self.rows.left_out)

    def draw(self) -> Example:
        """The next example. Raises ConfigError where no row of a data set passes `keep`."""
        return self.members[self.sources.next()].draw()

    def observe(self, example: Example, success: float) -> None:
        """Remember a group's success rate, 0 to 1: `env.difficulty` and `env.curriculum` decide by it."""
        self.members[example.source].observe(example.row, success)

    def find(self, source: str, row: int) -> Example | None:
        """The present example of a row; None where it is gone or left out."""
        place = self.members[source].places.get(row)
        return self.examples[place] if place is not None and self.rows.accepts(place) else None

    def metrics(self) -> dict[str, float]:
        """Metrics of left-out rows and of the curriculum.

        Any thread may call it.
        """
        found = {"prompts/left_out": float(self.left_out)} | self.sources.metrics()
        for name, member in self.members.items():
            found |= member.metrics(f"/{name}" if name else "")
        return found

    def state_dict(self) -> dict[str, Any]:
        members = self.members.items()
        return {
            "orders": {name: member.order.state() for name, member in members},
            "drawn": {name: member.drawn for name, member in members},
            "members": {name: member.state() for name, member in members},
            "sources": self.sources.state(),
        }

    def changes(self, state: dict[str, Any]) -> dict[str, DataChange]:
        """The rows of each member beside those that a state is of.

        Raises:
            ConfigError: it is of another mixture, or of other data.
        """
        if "members" not in state:
            raise ConfigError(
                "it holds no digest of the data: another version of this code wrote it; go on with that version, or "
                "begin another run from its weights: model.name=CHECKPOINT without train.resume"
            )
        if set(state["orders"]) != set(self.members):
            raise ConfigError(
                f"env.mixture: the checkpoint was made with {', '.join(state['orders']) or 'one data set'}; "
                "resume with the same members"
            )
        return {name: member.change(state["members"][name]) for name, member in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a state; a line for each data set with changed or new rows.

        Raises:
            ConfigError: as `changes`.
        """
        changes = self.changes(state)
        self.rows.left_out.clear()
        for name, member in self.members.items():
            member.order.go_to(*state["orders"][name])
            member.drawn = state["drawn"][name]
            member.load(state["members"][name], changes[name])
        self.sources.load(state["sources"])
        return [line for change in changes.values() for line in change.lines]


class PromptQueue:
    """A prompt source with a way back: examples that were drawn and not trained on are drawn again first.

    next_group_id: of the group that is begun next.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.returned: deque[Example] = deque()
        self.next_group_id = 0

    def begin(self, count: int) -> list[tuple[int, Example]]:
        """The next `count` examples, each with the id of the group that is made of it."""
        return [self.begin_one() for _ in range(count)]

    def begin_one(self) -> tuple[int, Example]:
        example = self.returned.popleft() if self.returned else self.source.draw()
        self.next_group_id += 1
        return self.next_group_id - 1, example

    def observe(self, example: Example, success: float) -> None:
        self.source.observe(example, success)

    def state_dict(self, outstanding: list[Example] | None = None) -> dict[str, Any]:
        """`outstanding`: examples in flight or buffered, to be drawn first after a resume."""
        waiting = [*(outstanding or []), *self.returned]
        return {
            "source": self.source.state_dict(),
            # Without the row, which may hold what a checkpoint cannot; the data still has it.
            "returned": [
                asdict(replace(example, row_data={})) | {"messages": list(example.messages)}
                for example in waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore a state; waiting examples are taken as the data have them now."""
        lines = self.source.load_state_dict(state["source"])
        waiting = [(fields["source"], fields["row"]) for fields in state["returned"]]
        found = [self.source.find(source, row) for source, row in waiting]
        self.returned = deque(example for example in found if example is not None)
        return lines
