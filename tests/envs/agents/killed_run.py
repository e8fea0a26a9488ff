"""Run with two agents, for a test that kills the process.

    python -m tests.envs.agents.killed_run IN_NAMESPACES COMMAND MARK READY

It prints the process id of its fork server.
"""

import asyncio
import sys

from config.schema.env import EnvConfig
from envs.agents.runner import AgentRunner
from tests.envs.agents.agent_helpers import KEY, MARK, URL, make_example


async def main(namespaces: str, agent: str, mark: str, ready: str) -> None:
    env = EnvConfig(dataset="arithmetic", agent=agent, agent_env={MARK: mark, "READY": ready})
    runner = AgentRunner(env, namespaces == "True")
    print(runner._fork_server.process.pid, flush=True)
    await asyncio.gather(*(runner.run(make_example(row), URL, KEY) for row in range(2)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
