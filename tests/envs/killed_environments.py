"""Process with environments in workers, for a test that kills the process.

It prints the process ids of the fork server, the worker, and a child that the environment started.
"""

import asyncio

from tests.envs.environment_helpers import env_config, example, make_factory, reply_text, turn


async def main() -> None:
    factory = make_factory(env_config("Naughty", environment_workers=1))
    environment = factory.make()
    await environment.reset(example())
    child = reply_text(await environment.step(turn("child")))
    workers = factory._workers
    assert workers is not None
    hanging_step = asyncio.ensure_future(environment.step(turn("hang")))
    print(workers._fork_server.process.pid, workers.workers[0].pid, child, flush=True)
    await hanging_step


if __name__ == "__main__":
    asyncio.run(main())
