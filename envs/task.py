"""Base class and registry of tasks, which make prompts from rows and score completions.

A task is a class with `examples(split)` and `reward(completion, example)`. A built-in task is a module in `envs/tasks`
with the `register` decorator (importing `envs.tasks` registers all of them); a user task is a class `module:Class`.
`envs.reward_workers.task_scorer` applies named rewards and weights of reward components. This module does not import
torch.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from config.schema.env import ENVIRONMENT_PROMPTS, EnvConfig
from config.schema.errors import ConfigError
from config.schema.model_rewards import MODEL_REWARDS
from envs.data import Row, usable_columns
from envs.data_digest import value_digest
from envs.example import SYSTEM_ROLES, Completion, Example, Message, Outcome, Reward
from envs.rewards import all_reward_names, check_columns, reward_system_prompt
from envs.row_files import is_message, is_text
from envs.user_code import describe_exception, is_user_code, load_user_object

__all__ = [
    "Completion",
    "Example",
    "Message",
    "Outcome",
    "Reward",
    "Task",
    "known_tasks",
    "load_examples",
    "make_task",
    "register",
]


class Task(ABC):
    """Base class of tasks: prompts and a reward.

    Subclasses have no state that changes after construction.
    """

    name: str = ""
    system_prompt: str | None = None
    in_process: bool = False
    """True only if the reward cannot hang, crash or take long, so that it needs no worker process."""
    min_score: float = 0.0
    """Lowest score of `reward`. A completion on which the reward hangs, crashes or exhausts memory scores `min_score`,
    or the lowest score of the run if that is lower."""
    reads_files: bool = True
    """Whether `examples` can read `env.data_files`."""
    reads_hub: bool = True
    """Whether `examples` reads a data set of the hub if `env.data_files` is unset."""
    reads_prefill: bool = False
    """Whether `examples` applies `env.prefill` itself."""
    duplicates: str | None = None
    """Replaces `env.duplicates` for tasks that must not keep duplicates."""
    weights: Mapping[str, float] = MappingProxyType({"accuracy": 1.0})
    """Components of the reward, with the contribution of each to the score."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.name = self.name or env.dataset
        self.members: dict[str, Task] = {}

    def check_options(self, option_names: Iterable[str]) -> None:
        """Raises ConfigError for a key of `env.options` that is not in `option_names`."""
        names = list(option_names)
        for key in sorted(set(self.env.options) - set(names)):
            raise ConfigError(
                f"env.options.{key}: no such option of the {self.name} task; choose one of {', '.join(names)}"
            )

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """Returns the examples of a split, in a fixed order."""

    @abstractmethod
    def reward(self, completion: Completion, example: Example) -> Reward:
        """Returns the reward of one completion; pure and deterministic.

        Raises only on errors of data or code.
        """

    def warm_up(self) -> None:  # noqa: B027
        """Imports slow modules once before the first reward; subclasses override this method."""

    def messages(self, user: str, row_system_prompt: str | None = None) -> tuple[Message, ...]:
        """Builds the chat of one user message with its system prompt.

        The system prompt is `env.system_prompt`, else the prompt of `env.reward`, else `row_system_prompt`, else the
        task's own.
        """
        system = self.env.system_prompt
        if system is None:
            system = reward_system_prompt(self.env) or row_system_prompt or self.system_prompt
            system = None if system and system in user else system
        head = ({"role": "system", "content": system},) if system else ()
        return (*head, {"role": "user", "content": user})

    def conversation(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the chat of a row with `env.system_prompt` in place of its system messages.

        Without `env.system_prompt` the prompt of `env.reward` is appended to the chat's system message.
        """
        system = self.env.system_prompt
        if system is not None:
            head = ({"role": "system", "content": system},) if system else ()
            return (*head, *(message for message in messages if message["role"] not in SYSTEM_ROLES))
        reward_prompt = reward_system_prompt(self.env)
        if not reward_prompt or any(reward_prompt in message["content"] for message in messages):
            return tuple(messages)
        first, *rest = messages
        if first["role"] not in SYSTEM_ROLES:
            return ({"role": "system", "content": reward_prompt}, *messages)
        return (first | {"content": f"{first['content']}\n\n{reward_prompt}"}, *rest)

    @property
    def accepts_any_answer_form(self) -> bool:
        """Whether only user code or a model scores, so that answers may have any form."""
        names = all_reward_names(self.env) or [self.env.environment or ""]
        return all(is_user_code(name) or name in MODEL_REWARDS for name in names)

    def row_data(self, row: Row) -> Mapping[str, Any]:
        """Returns the columns for `Example.row_data`.

        With a task, reward or environment of the user, or with `env.agent_columns`, these are all usable columns, else
        only `curriculum_columns` and the column of `env.judge.rubric_column`. Built-in rewards read no columns, so
        large columns are then neither stored nor sent to workers.
        """
        names = [self.env.dataset, self.env.environment or "", *all_reward_names(self.env)]
        if self.env.agent_columns or any(is_user_code(name) for name in names):
            return usable_columns(row.values)
        rubric = self.env.judge.rubric_column
        rubrics = {rubric: row.values[rubric]} if rubric is not None and rubric in row.values else {}
        return {**self.curriculum_columns(row.values), **rubrics}

    def curriculum_columns(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the column of `env.curriculum.column`, or no column if that is unset.

        Without this column in the row all columns are returned, for a message that lists them.
        """
        column = self.env.curriculum.column
        if column is None:
            return {}
        return {column: columns[column]} if column in columns else columns


_REGISTRY: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator that registers a task as `env.dataset=name`."""

    def decorate(cls: type[Task]) -> type[Task]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def known_tasks() -> list[str]:
    """Returns the names of all registered tasks."""
    import envs.tasks  # noqa: F401  (importing registers them)

    return sorted(_REGISTRY)


def make_task(env: EnvConfig) -> Task:
    """Makes the task of `env.dataset`.

    Raises:
        ConfigError: the name is unknown; the class is no task, or its construction fails; a weight is of a component
            that the reward lacks.
    """
    if is_user_code(env.dataset):
        place, found = f"env.dataset={env.dataset}", load_user_object("env.dataset", env.dataset)
        if not (inspect.isclass(found) and issubclass(found, Task)):
            raise ConfigError(f"{place}: {found!r} is not a task class; derive a class from envs.task.Task")
        if inspect.isabstract(found):
            raise ConfigError(
                f"{place}: the class lacks {', '.join(sorted(found.__abstractmethods__))}; define these methods"
            )
        try:
            task = found(env)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{place}: creating the task failed: {describe_exception(error)}") from error
    else:
        known = known_tasks()
        if env.dataset not in _REGISTRY:
            raise ConfigError(
                f"env.dataset={env.dataset!r}: no such task; choose one of {', '.join(known)}, or name a "
                "class of your own as module:Class"
            )
        _check_source(env, _REGISTRY[env.dataset])
        task = _REGISTRY[env.dataset](env)
    absent = sorted(set(env.reward_weights or ()) - set(task.weights))
    if env.reward is None and absent:
        raise ConfigError(
            f"env.reward_weights.{absent[0]}: the reward of {env.dataset} has no such component; choose one "
            f"of {', '.join(sorted(task.weights))}"
        )
    return task


def _check_source(env: EnvConfig, task: type[Task]) -> None:
    """Raises ConfigError for files or a revision that a built-in task does not read."""
    files, revision = f"env.data_files={env.data_files}", f"env.data_revision={env.data_revision}"
    if env.data_files is not None and not task.reads_files:
        raise ConfigError(
            f"{files}: env.dataset={env.dataset} reads no file; set env.dataset=jsonl for rows of your own, "
            "or remove data_files"
        )
    if env.data_revision is not None and not task.reads_hub:
        raise ConfigError(f"{revision}: env.dataset={env.dataset} reads nothing from the hub; remove data_revision")
    if env.data_revision is not None and env.data_files is not None:
        raise ConfigError(
            f"{revision} with {files}: local files have no revision of the hub; remove one of the two settings"
        )


def load_examples(task: Task, split: str) -> Sequence[Example]:
    """Loads and checks the examples of a split, with `env.prefill` applied.

    Raises:
        ConfigError: an example of a user task is wrong, a prompt has a lone surrogate, or a reward takes a column that
            no row has.
    """
    is_user_task = is_user_code(task.env.dataset) or task.env.dataset == ENVIRONMENT_PROMPTS
    try:
        examples = task.examples(split)
    except ConfigError:
        raise
    except Exception as error:
        if not is_user_task:
            raise
        raise ConfigError(f"env.dataset={task.env.dataset}: examples() failed: {describe_exception(error)}") from error
    if is_user_task and not isinstance(examples, Sequence):
        raise ConfigError(
            f"env.dataset={task.env.dataset}: examples() returned {type(examples).__name__}; return a list "
            "of envs.task.Example"
        )
    indices: dict[int, int] = {}
    for index, example in enumerate(examples):
        is_valid = not is_user_task and all(is_text(message["content"]) for message in example.messages)
        problem = None if is_valid else _example_problem(example)
        if is_user_task and not problem and indices.setdefault(example.row, index) != index:
            first = indices[example.row]
            problem = f"has row={example.row}, the same as example {first}; give each example its own number"
        if problem:
            raise ConfigError(f"env.dataset={task.env.dataset}: example {index} {problem}")
    if examples:
        check_columns(task.env, examples)
    if task.env.environment is not None and not task.members:  # its replies may depend on the answer and the columns
        examples = [replace(one, problem_id=value_digest([one.answer, one.row_data], 8)) for one in examples]
    columns = task.env.agent_columns
    if columns and not task.members:  # the agent reads them, so they belong to the problem
        examples = [
            replace(one, problem_id=value_digest([one.row_data.get(name) for name in columns], 8)) for one in examples
        ]
    prefill = task.env.prefill
    if not prefill or task.members or task.reads_prefill:
        return examples
    return [example if example.prefill else replace(example, prefill=prefill) for example in examples]


def _example_problem(example: Any) -> str | None:
    """Describes the problem of an example as the end of a sentence, or returns None."""
    if not isinstance(example, Example):
        return f"is {type(example).__name__}; return an envs.task.Example"
    if not isinstance(example.messages, tuple) or not example.messages:
        return 'has no messages; create messages with self.messages("...")'
    for message in example.messages:
        if not is_message(message):
            return f"has the message {message!r}; a message needs a role and a content, both text"
        if not is_text(message["content"]):
            return f"has half a character (a lone surrogate) in its prompt: {message['content'][:200]!a}"
    if type(example.row) is not int:
        return f"has row={example.row!r}; a whole number is needed"
    return None
