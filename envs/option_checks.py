"""Checks of tasks, rewards, tools and rows before anything is loaded."""

from collections.abc import Iterator, Sequence

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import data_files
from envs.duplicates import distinct_examples
from envs.example import Example
from envs.prompts import PromptSource
from envs.rewards import find_rewards, find_second_opinion
from envs.task import Task, make_task
from envs.teacher_prompt import teacher_prompt
from envs.tool_calls import find_tools
from envs.user_code import is_own


def option_problems(config: Config) -> list[str]:
    """Problems of `env` and of each of `eval.sets`, one message each; no row is read."""
    found = []
    for place, env in _sections(config):
        for look in (data_files, find_rewards, find_second_opinion, make_task, find_tools):
            try:
                look(env)
            except ConfigError as error:
                found.append(f"{place}{error}")
    return found


def hub_notes(config: Config) -> list[str]:
    """A sentence for each data set of the hub, whose rows `row_problems` does not read."""
    found = []
    for place, env in _sections(config):
        task = make_task(env)
        for name, one in {"": task, **task.members}.items():
            if reads_hub(one):
                member = f"env.mixture.{name}: " if name else ""
                asked = f"{place}{member}env.dataset={one.env.dataset}"
                found.append(f"{asked} is read from the hub: its rows were not looked at")
    return found


def reads_local_rows(config: Config) -> bool:
    """Whether rows come from local files or user tasks, none from the hub."""
    tasks = [make_task(env) for _, env in _sections(config)]
    tasks += [member for task in tasks for member in task.members.values()]
    local = [task.env.data_files is not None or is_own(task.env.dataset) for task in tasks]
    return any(local) and not any(map(reads_hub, tasks))


def reads_hub(task: Task) -> bool:
    """Whether the rows of this task of ours come from the hub."""
    return task.reads_hub and task.env.data_files is None and not is_own(task.env.dataset)


def check_any_rows(place: str, examples: Sequence[Example]) -> None:
    """Raises ConfigError where an evaluation set, `eval.sets.NAME`, has none."""
    if not examples:
        raise ConfigError(f"{place}: the data set has no rows; check {place}.data_files and {place}.split")


def _sections(config: Config) -> list[tuple[str, EnvConfig]]:
    """Message prefix and `env` section of training and of each evaluation set."""
    keys = {f"eval.sets.{name}": chosen for name, chosen in config.eval.sets.items()}
    return [("", config.env), *((f"{key}: ", chosen.env(key, config.env)) for key, chosen in keys.items())]


def row_problems(config: Config) -> Iterator[str]:
    """Problems of the rows that a run would report, but for their length.

    Rows of local files, of generators and of a user's own tasks are read, none of the hub.
    """
    teacher = teacher_prompt(config.policy)
    for place, env in _sections(config):
        try:
            task = make_task(env)
            of_hub = [one for one in (task, *task.members.values()) if reads_hub(one)]
            if of_hub:
                for one in task.members.values():
                    _ = one in of_hub or distinct_examples(one, env.split)
                continue
            examples = distinct_examples(task, env.split)
            if place:
                check_any_rows(place.removesuffix(": "), examples)
            else:
                PromptSource(examples, 0, lambda _: True, env.difficulty, curriculum=env.curriculum)
                if teacher is not None:
                    teacher.check(examples, f"env.dataset={env.dataset}")
        except ConfigError as error:
            text = str(error)
            yield text if place and text.startswith(place) else f"{place}{text}"
