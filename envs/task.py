"""Tasks: rows turned into prompts, completions turned into rewards. No torch here.

A task is a class with `examples(split)` and `reward(completion, example)`: one file in `envs/tasks`, named by the
`register` decorator (importing `envs.tasks` registers all of them), or a class of the user's, `module:Class`.
`envs.judging.judge` puts the rewards that a user names and the weights of parts on top.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, usable_columns
from envs.example import SYSTEM_ROLES, Completion, Example, Message, Outcome, Reward
from envs.rewards import asked_form, check_columns, judge_names
from envs.row_files import is_message, is_text
from envs.user_code import described, is_own, load_own

__all__ = [
    "Completion",
    "Example",
    "Message",
    "Outcome",
    "Reward",
    "Task",
    "checked_examples",
    "known_tasks",
    "make_task",
    "register",
]


class Task(ABC):
    """Prompts and their judge. Subclasses are pure: no state changes after construction."""

    name: str = ""
    system_prompt: str | None = None
    in_process: bool = False
    """True only where judging cannot hang, crash or take long: then no worker process is used."""
    min_score: float = 0.0
    """The least score that `reward` gives. A completion that it could not get through (it hung, crashed, took all
    memory) scores that, or the lowest score that was seen where this is less."""
    reads_files: bool = True
    """Whether `examples` reads `env.data_files`, where they are given."""
    reads_hub: bool = True
    """Whether it reads a data set of the hub, where they are not."""
    reads_prefill: bool = False
    """Whether `examples` sees to `env.prefill` itself."""
    duplicates: str | None = None
    """Replaces `env.duplicates` where a task must not keep them."""
    weights: Mapping[str, float] = MappingProxyType({"accuracy": 1.0})
    """The parts of the reward and what each contributes to the score."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = env
        self.name = self.name or env.dataset
        self.members: dict[str, Task] = {}

    def check_options(self, known: Iterable[str]) -> None:
        """Raises ConfigError for a key of `env.options` that is not among the known."""
        names = list(known)
        for key in sorted(set(self.env.options) - set(names)):
            raise ConfigError(f"env.options.{key}: the {self.name} task knows {', '.join(names)}")

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """Return the prompts of a split, in a fixed order."""

    @abstractmethod
    def reward(self, completion: Completion, example: Example) -> Reward:
        """Judge one completion; pure and deterministic. Raises only on errors of data or code."""

    def warm_up(self) -> None:  # noqa: B027
        """Called once before judging begins: import here what is slow to import."""

    def messages(self, user: str, form: str | None = None) -> tuple[Message, ...]:
        """The chat for one user message: `env.system_prompt`, else that of `env.reward`, else the task's own, which
        `form` replaces where one row asks for another."""
        system = self.env.system_prompt
        if system is None:
            system = asked_form(self.env) or form or self.system_prompt
            system = None if system and system in user else system
        head = ({"role": "system", "content": system},) if system else ()
        return (*head, {"role": "user", "content": user})

    def conversation(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """A row's chat with `env.system_prompt` in the place of its system messages.

        Where that is unset, the system message ends with the form that `env.reward` asks for.
        """
        system = self.env.system_prompt
        if system is not None:
            head = ({"role": "system", "content": system},) if system else ()
            return (*head, *(message for message in messages if message["role"] not in SYSTEM_ROLES))
        form = asked_form(self.env)
        if not form or any(form in message["content"] for message in messages):
            return tuple(messages)
        first, *rest = messages
        if first["role"] not in SYSTEM_ROLES:
            return ({"role": "system", "content": form}, *messages)
        return (first | {"content": f"{first['content']}\n\n{form}"}, *rest)

    @property
    def judged_by_user(self) -> bool:
        """Whether only rewards of the user's judge: any reference answer is then allowed."""
        return bool(self.env.reward) and all(is_own(name) for name in judge_names(self.env))

    def row_data(self, row: Row) -> Mapping[str, Any]:
        """For `Example.row_data`: the row's columns where a function or class of the user's judges or prompts, else
        what `kept` keeps.

        The judges of this project read none, so that big columns are then neither kept nor sent to workers.
        """
        names = [self.env.dataset, *judge_names(self.env)]
        return usable_columns(row.values) if any(is_own(name) for name in names) else self.kept(row.values)

    def kept(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the column that `env.curriculum.column` names.

        All of them where it is not there, for a message that lists them.
        """
        column = self.env.curriculum.column
        if column is None:
            return {}
        return {column: columns[column]} if column in columns else columns


_REGISTRY: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[type[Task]], type[Task]]:
    """Class decorator: makes the task available as `env.dataset=name`."""

    def decorate(cls: type[Task]) -> type[Task]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return decorate


def known_tasks() -> list[str]:
    import envs.tasks  # noqa: F401  (importing registers them)

    return sorted(_REGISTRY)


def make_task(env: EnvConfig) -> Task:
    """The task that `env.dataset` names.

    Raises:
        ConfigError: an unknown name, listing the known ones; a class that is no task, or cannot be made; a weight of
            a part that its reward does not give.
    """
    if is_own(env.dataset):
        place, found = f"env.dataset={env.dataset}", load_own("env.dataset", env.dataset)
        if not (inspect.isclass(found) and issubclass(found, Task)):
            raise ConfigError(f"{place}: {found!r} is no task; derive a class from envs.task.Task")
        if inspect.isabstract(found):
            raise ConfigError(f"{place}: the class lacks {', '.join(sorted(found.__abstractmethods__))}")
        try:
            task = found(env)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{place}: making one failed: {described(error)}") from error
    else:
        known = known_tasks()
        if env.dataset not in _REGISTRY:
            raise ConfigError(
                f"env.dataset={env.dataset!r} is not a known task; known: {', '.join(known)}; a class of your own is "
                "named module:Class"
            )
        _check_source(env, _REGISTRY[env.dataset])
        task = _REGISTRY[env.dataset](env)
    absent = sorted(set(env.reward_weights or ()) - set(task.weights))
    if env.reward is None and absent:
        raise ConfigError(
            f"env.reward_weights.{absent[0]}: the reward of {env.dataset} has no such part; it gives "
            f"{', '.join(sorted(task.weights))}"
        )
    return task


def _check_source(env: EnvConfig, task: type[Task]) -> None:
    """Raises ConfigError for files or a revision that this task of ours does not read."""
    files, revision = f"env.data_files={env.data_files}", f"env.data_revision={env.data_revision}"
    if env.data_files is not None and not task.reads_files:
        raise ConfigError(
            f"{files}: env.dataset={env.dataset} reads no file; take env.dataset=jsonl for rows of your own, or leave "
            "data_files out"
        )
    if env.data_revision is not None and not task.reads_hub:
        raise ConfigError(
            f"{revision}: env.dataset={env.dataset} reads nothing from the hub; leave data_revision out"
        )
    if env.data_revision is not None and env.data_files is not None:
        raise ConfigError(
            f"{revision} with {files}: local files have no revision of the hub; leave one of the two out"
        )


def checked_examples(task: Task, split: str) -> Sequence[Example]:
    """The task's examples of a split, each of them looked at.

    Raises:
        ConfigError: what is wrong with an example of a task of the user's; half a character in a prompt; a reward asks
            for a column that no row has.
    """
    own = is_own(task.env.dataset)
    try:
        examples = task.examples(split)
    except ConfigError:
        raise
    except Exception as error:
        if not own:
            raise
        raise ConfigError(f"env.dataset={task.env.dataset}: examples() failed: {described(error)}") from error
    if own and not isinstance(examples, Sequence):
        raise ConfigError(
            f"env.dataset={task.env.dataset}: examples() gave {type(examples).__name__}; a list of envs.task.Example "
            "is needed"
        )
    places: dict[int, int] = {}
    for place, example in enumerate(examples):
        clean = not own and all(is_text(message["content"]) for message in example.messages)
        trouble = None if clean else _trouble(example)
        if own and not trouble and places.setdefault(example.row, place) != place:
            first = places[example.row]
            trouble = f"has row={example.row}, as example {first} has; give each a number of its own"
        if trouble:
            raise ConfigError(f"env.dataset={task.env.dataset}: example {place} {trouble}")
    if examples:
        check_columns(task.env, examples)
    prefill = task.env.prefill
    if not prefill or task.members or task.reads_prefill:
        return examples
    return [example if example.prefill else replace(example, prefill=prefill) for example in examples]


def _trouble(example: Any) -> str | None:
    """The fault of an example, as the end of a sentence."""
    if not isinstance(example, Example):
        return f"is {type(example).__name__}; envs.task.Example is needed"
    if not isinstance(example.messages, tuple) or not example.messages:
        return 'has no messages; make them with self.messages("...")'
    for message in example.messages:
        if not is_message(message):
            return f"has the message {message!r}; it needs a role and a content, both text"
        if not is_text(message["content"]):
            return f"has half a character (a lone surrogate) in its prompt: {message['content'][:200]!a}"
    if type(example.row) is not int:
        return f"has row={example.row!r}; a whole number is needed"
    return None
