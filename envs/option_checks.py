"""Lists problems of tasks, rewards, tools and local rows before models and engines load."""

from collections.abc import Iterator, Sequence

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.agents.runner import check_agent_start
from envs.data import data_files
from envs.duplicates import distinct_examples
from envs.environments.definition import find_environment
from envs.example import Example
from envs.prompts import PromptSource
from envs.reward_workers.group_reward import load_group_function
from envs.rewards import find_fallback_reward, find_rewards
from envs.task import Task, make_task
from envs.teacher_prompt import teacher_prompt
from envs.tool_calls import find_tools
from envs.user_code import is_user_code


def option_problems(config: Config) -> list[str]:
    """Returns the problems of `env` and `eval.sets`, one message each, without reading rows."""
    found = []
    for place, env in _sections(config):
        checks = (data_files, find_rewards, find_fallback_reward, find_environment, make_task)
        for check in (*checks, _check_group_reward, _check_tools, _check_agent):
            try:
                check(env)
            except ConfigError as error:
                message = f"{place}{error}"
                found += [] if message in found else [message]
    return found


def _check_group_reward(env: EnvConfig) -> None:
    if env.group_reward is not None:
        load_group_function(env)


def _check_agent(env: EnvConfig) -> None:
    """Checks the agent of `env.agent`, whose function is imported in another process.

    Raises:
        ConfigError: as `AgentRunner`.
    """
    if env.agent is not None:
        check_agent_start(env)


def _check_tools(env: EnvConfig) -> None:
    """Checks the tools of `env.tools`, and starts no MCP server.

    Raises:
        ConfigError: as `find_tools` or `check_tools`.
    """
    if not env.tools:
        return
    if env.tool_format == "tags":
        find_tools(env)
        return
    from envs.tools.tool_set import check_tools  # loads the library of schemas, which most runs do not need

    check_tools(env)


def hub_notes(config: Config) -> list[str]:
    """Returns a note for each hub data set, since `row_problems` reads no hub rows."""
    found = []
    for place, env in _sections(config):
        task = make_task(env)
        for name, one in {"": task, **task.members}.items():
            if reads_hub(one):
                member = f"env.mixture.{name}: " if name else ""
                setting = f"{place}{member}env.dataset={one.env.dataset}"
                found.append(f"{setting} is read from the hub: its rows were not checked")
    return found


def has_local_prompts(config: Config) -> bool:
    """Whether files, user tasks or environments make prompts, and the hub makes none."""
    tasks = [make_task(env) for _, env in _sections(config)]
    tasks += [member for task in tasks for member in task.members.values()]
    local = [task.env.data_files is not None or is_user_code(task.env.dataset) for task in tasks]
    return (config.env.environment is not None or any(local)) and not any(map(reads_hub, tasks))


def reads_hub(task: Task) -> bool:
    """Whether the rows of a built-in task come from the hub."""
    return task.reads_hub and task.env.data_files is None and not is_user_code(task.env.dataset)


def check_any_rows(place: str, examples: Sequence[Example]) -> None:
    """Raises ConfigError if an evaluation set has no rows. place: `eval.sets.NAME`."""
    if not examples:
        raise ConfigError(f"{place}: the data set has no rows; check {place}.data_files and {place}.split")


def _sections(config: Config) -> list[tuple[str, EnvConfig]]:
    """Returns message prefix and `env` section of training and of each evaluation set."""
    keys = {f"eval.sets.{name}": chosen for name, chosen in config.eval.sets.items()}
    return [("", config.env), *((f"{key}: ", chosen.env(key, config.env)) for key, chosen in keys.items())]


def row_problems(config: Config) -> Iterator[str]:
    """Yields the problems of data rows that a run would report, except prompt lengths.

    Rows of local files, of generators and of user tasks are read, but no rows of the hub.
    """
    teacher = teacher_prompt(config.policy)
    for place, env in _sections(config):
        try:
            task = make_task(env)
            hub_tasks = [one for one in (task, *task.members.values()) if reads_hub(one)]
            if hub_tasks:
                for one in task.members.values():
                    _ = one in hub_tasks or distinct_examples(one, env.split)
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
