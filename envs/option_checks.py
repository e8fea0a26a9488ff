"""Checks of tasks, rewards and tools before any data is read: names, options, files, the parts that weights name."""

from config.env import EnvConfig
from config.errors import ConfigError
from config.schema import Config
from envs.data import data_files
from envs.rewards import find_rewards, find_second_opinion
from envs.task import make_task
from envs.tools.tool import find_tools


def option_problems(config: Config) -> list[str]:
    """What is wrong with `env` and with each of `eval.sets`, one message each; no data is read."""
    sections = [("", config.env)]
    sections += [
        (f"eval.sets.{name}: ", chosen.env(name, config.env)) for name, chosen in config.eval.sets.items()
    ]
    return [f"{place}{error}" for place, env in sections for error in _problems(env)]


def _problems(env: EnvConfig) -> list[str]:
    found = []
    for look in (data_files, find_rewards, find_second_opinion, _task, find_tools):
        try:
            look(env)
        except ConfigError as error:
            found.append(str(error))
    return found


def _task(env: EnvConfig) -> None:
    task = make_task(env)
    absent = sorted(set(env.reward_weights or ()) - set(task.weights))
    if env.reward is None and absent:
        raise ConfigError(
            f"env.reward_weights.{absent[0]}: the reward of {env.dataset} has no such part; it gives "
            f"{', '.join(sorted(task.weights))}"
        )
