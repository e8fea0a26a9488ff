"""Prompt source of training and its queue, both seeded and resumable.

By default every row is sampled once an epoch, in an order shuffled by seed and epoch. A mixture has one such order per
member, and the weights alone choose the next member, as evenly as whole prompts allow. Prompts whose recent success
rate lies outside `env.difficulty` are skipped for some epochs. `env.curriculum` changes the choice: difficulty levels,
priorities by success, replay of solved prompts, and source weights by success (envs/curriculum/).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from config.schema.curriculum import CurriculumConfig
from config.schema.env import DifficultyConfig
from config.schema.errors import ConfigError
from envs.curriculum.dataset_source import DatasetSource
from envs.curriculum.source_weights import FixedSourceWeights, SourceWeights, SuccessSourceWeights
from envs.data_digest import DataChange
from envs.example import Example, MixedExamples
from envs.prompt_rows import PromptRows


class PromptSource:
    """Endless, seeded stream of examples.

    Args:
        examples: one split of a task; several data sets if a `MixedExamples`.
        seed: fixes the next example, together with the earlier samples and observed success rates.
        fits_limit: whether a prompt is within the length limit. Examples over the limit are skipped and counted. The
            function is called once per row, when the row is first sampled.
        difficulty: success rates to train on; see `observe`.
        describe_length: describes the length of prompts that are all too long, and a further remedy, for messages.
        curriculum: levels, priorities, replay and source weights.
        setting: name of the data's config key, for messages; a mixture takes the member's key.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        fits_limit: Callable[[Example], bool],
        difficulty: DifficultyConfig | None = None,
        describe_length: Callable[[Sequence[Example]], tuple[str, str]] | None = None,
        curriculum: CurriculumConfig | None = None,
        setting: str = "env.data_files",
    ) -> None:
        if not len(examples):
            raise ConfigError("the dataset has no rows; check env.data_files, env.split and env.holdout")
        self.examples = examples
        self.rows = PromptRows(examples, fits_limit, describe_length)
        bounds = examples.bounds if isinstance(examples, MixedExamples) else {"": (0, len(examples))}
        empty = [name for name, (start, end) in bounds.items() if start == end]
        if empty:
            raise ConfigError(f"env.mixture.{empty[0]}: this member has no rows; check its data_files and split")
        config, difficulty_config = curriculum or CurriculumConfig(), difficulty or DifficultyConfig()
        columns = config.column
        self.members = {
            name: DatasetSource(
                self.rows,
                name,
                f"env.mixture.{name}" if name else setting,
                member_bounds,
                seed,
                difficulty_config,
                replace(config, column=columns.get(name) if isinstance(columns, Mapping) else columns),
            )
            for name, member_bounds in bounds.items()
        }
        weights = examples.weights if isinstance(examples, MixedExamples) else {"": 1.0}
        self.source_weights: SourceWeights = (
            FixedSourceWeights(self.members, weights)
            if config.sources is None
            else SuccessSourceWeights(self.members, weights, config)
        )

    @property
    def num_too_long(self) -> int:
        """Number of rows found over the length limit so far."""
        return len(self.rows.too_long_rows)

    def next_example(self) -> Example:
        """Samples the next example.

        Raises ConfigError if all rows of a data set are too long.
        """
        return self.members[self.source_weights.next_source()].next_example()

    def observe(self, example: Example, success: float) -> None:
        """Records a group's success rate, 0 to 1, for `env.difficulty` and `env.curriculum`."""
        self.members[example.source].observe(example.row, success)

    def find_example(self, source: str, row: int) -> Example | None:
        """Returns the example of a row, or None.

        None means that the data lack the row, or that its prompt is too long.
        """
        index = self.members[source].row_indices.get(row)
        return self.examples[index] if index is not None and self.rows.accepts(index) else None

    def metrics(self) -> dict[str, float]:
        """Returns metrics of too long prompts and of the curriculum.

        Any thread may call this method.
        """
        found = {"prompts/too_long": float(self.num_too_long)} | self.source_weights.metrics()
        for name, member in self.members.items():
            found |= member.metrics(f"/{name}" if name else "")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        members = self.members.items()
        return {
            "orders": {name: member.order.state() for name, member in members},
            "drawn": {name: member.num_sampled for name, member in members},
            "members": {name: member.state() for name, member in members},
            "sources": self.source_weights.state(),
        }

    def compare_data(self, state: dict[str, Any]) -> dict[str, DataChange]:
        """Compares the rows of each member with the rows of a checkpoint's state.

        Raises:
            ConfigError: the state is of another mixture, or of other data.
        """
        if "members" not in state:
            raise ConfigError(
                "the checkpoint has no digest of the data, as another version of this code wrote the "
                "checkpoint; continue with that version, or begin another run from the checkpoint's "
                "weights: model.name=CHECKPOINT without train.resume"
            )
        if set(state["orders"]) != set(self.members):
            raise ConfigError(
                f"env.mixture: the checkpoint was made with {', '.join(state['orders']) or 'one data set'}; "
                "resume with the same members"
            )
        return {name: member.compare_data(state["members"][name]) for name, member in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restores a state; returns log lines on changed and new rows. Raises ConfigError as `compare_data`."""
        changes = self.compare_data(state)
        self.rows.too_long_rows.clear()
        for name, member in self.members.items():
            member.order.set_position(*state["orders"][name])
            member.num_sampled = state["drawn"][name]
            member.load(state["members"][name], changes[name])
        self.source_weights.load(state["sources"])
        return [line for change in changes.values() for line in change.lines]


class PromptQueue:
    """Queue of prompts for new groups; returned examples come before new samples.

    Attributes:
        returned_examples: examples that were sampled but not trained on.
        next_group_id: id of the next group.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.returned_examples: deque[Example] = deque()
        self.next_group_id = 0

    def next_prompts(self, count: int) -> list[tuple[int, Example]]:
        """Returns the next `count` examples, each with the id of its group."""
        return [self.next_prompt() for _ in range(count)]

    def next_prompt(self) -> tuple[int, Example]:
        """Returns the next example and the id of its group."""
        example = self.returned_examples.popleft() if self.returned_examples else self.source.next_example()
        self.next_group_id += 1
        return self.next_group_id - 1, example

    def observe(self, example: Example, success: float) -> None:
        """Records a group's success rate, 0 to 1."""
        self.source.observe(example, success)

    def state_dict(self, outstanding: list[Example] | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint.

        Args:
            outstanding: examples in flight or buffered; they come first after a resume.
        """
        waiting = [*(outstanding or []), *self.returned_examples]
        return {
            "source": self.source.state_dict(),
            # Without the row's columns: a checkpoint cannot hold every value, and the data set has them.
            "returned": [
                asdict(replace(example, row_data={})) | {"messages": list(example.messages)} for example in waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restores a state, with the waiting examples as they are in the current data.

        Returns log lines, as `PromptSource.load_state_dict`.
        """
        lines = self.source.load_state_dict(state["source"])
        waiting = [(fields["source"], fields["row"]) for fields in state["returned"]]
        found = [self.source.find_example(source, row) for source, row in waiting]
        self.returned_examples = deque(example for example in found if example is not None)
        return lines
