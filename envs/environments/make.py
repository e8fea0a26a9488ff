"""Makes the environments of a run.

env.environment ─▶ EnvironmentDefinition ─▶ EnvironmentFactory.make ─▶ an environment of one episode
                                                   │
                          env.environment_workers ─┴▶ in a worker process, else in this process
"""

from config.schema.env import EnvConfig
from envs.environments.calls import CallRunner
from envs.environments.definition import EnvironmentDefinition
from envs.environments.interface import Environment
from envs.environments.worker_pool import EnvironmentWorkers
from envs.user_calls import BlockingCalls, DaemonThread


class EnvironmentFactory:
    """Makes the environments of a run, one for each episode.

    definition: of `env.environment`.
    """

    def __init__(self, env: EnvConfig, definition: EnvironmentDefinition) -> None:
        self.definition = definition
        self.seconds = env.step_timeout_s
        self._blocking_calls = BlockingCalls("write def instead of async def, or set env.environment_workers")
        self._workers = None if env.environment_workers is None else EnvironmentWorkers(env)

    def make(self) -> Environment:
        """Makes an environment, whose reset makes the user's object."""
        if self._workers is not None:
            return self._workers.make()
        return self.definition.make(CallRunner(self.seconds, self._blocking_calls, DaemonThread("environment")))

    async def close(self) -> None:
        """Ends threads and processes, after all environments are closed."""
        self._blocking_calls.close()
        if self._workers is not None:
            await self._workers.close()
