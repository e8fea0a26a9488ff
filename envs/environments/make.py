"""Makes the environments of a run.

env.environment ─▶ EnvironmentDefinition ─▶ EnvironmentFactory.make ─▶ an environment of one episode
                                                   │
                          env.environment_workers ─┴▶ in a worker process, else in this process
"""

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.environments.calls import BlockingCalls, CallRunner, EnvironmentThread
from envs.environments.definition import find_environment
from envs.environments.interface import Environment
from envs.environments.worker_pool import EnvironmentWorkers


class EnvironmentFactory:
    """Makes the environments of a run, one for each episode.

    Raises:
        ConfigError: as `find_environment`.
    """

    def __init__(self, env: EnvConfig) -> None:
        definition = find_environment(env)
        if definition is None:
            raise ConfigError("env.environment=null: there is no environment; set env.environment")
        self.definition = definition
        self.seconds = env.step_timeout_s
        self._blocking_calls = BlockingCalls()
        self._workers = None if env.environment_workers is None else EnvironmentWorkers(env)

    def make(self) -> Environment:
        """Makes an environment, whose reset makes the user's object."""
        if self._workers is not None:
            return self._workers.make()
        return self.definition.make(CallRunner(self.seconds, self._blocking_calls, EnvironmentThread()))

    async def close(self) -> None:
        """Ends threads and processes, after all environments are closed."""
        self._blocking_calls.close()
        if self._workers is not None:
            await self._workers.close()
