"""Trainer process with hanging verifications, for a test that kills it.

It prints the process ids of its child, the fork server and the workers.
"""

import os
import time

from config.schema.env import EnvConfig
from envs.reward_workers.service import RewardService
from envs.task import Completion, Example, make_task


def main() -> None:
    env = EnvConfig(
        dataset="arithmetic", reward="tests.envs.hostile_rewards:bomb", reward_workers=2, reward_timeout_s=300.0
    )
    service = RewardService(make_task(env), env)
    examples = [Example(({"role": "user", "content": "?"},), "ok", row) for row in range(4)]
    service.score([Completion("a")] * 4, examples)
    pool = service._pool
    assert pool is not None
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        time.sleep(600)
        os._exit(0)
    service.poll(service.submit([Completion("sleep")] * 4, examples), timeout=0.5)
    print(child, pool.process.pid, *(worker.pid for worker in pool.workers), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
