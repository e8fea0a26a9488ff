"""Episodes of the real player on a virtual clock, in an environment that waits."""

import asyncio
import random
import time
from dataclasses import dataclass, field, replace

from transformers import AutoTokenizer

from envs.environments.interface import Environment, Observation, Step
from envs.example import Example, Message
from envs.group import SampledCompletion, Sampling
from tests.group_collection import EPISODE_LIMITS, make_group_rollout
from tests.rollout.recording import EOS, QUICKSTART, RecordingRewards, addition_examples
from tests.rollout.virtual_clock import VirtualClock, VirtualEngine
from torchgrpo.rollout.engine_loop import EngineLoop


class WaitingEnvironment:
    """Environment that waits before its answer to each of `turns` turns."""

    def __init__(self, turns: int, wait_s: float) -> None:
        self.turns, self.wait_s = turns, wait_s

    async def reset(self, example: Example) -> Observation:
        return Observation()

    async def step(self, turn: Message) -> Step:
        await asyncio.sleep(self.wait_s)
        self.turns -= 1
        return Step(({"role": "user", "content": "+?"},) if self.turns else (), reward=0.5)

    async def close(self) -> None:
        """Does nothing."""


@dataclass
class PlayedEpisodes:
    """Episodes of the real player, `rounds` times as many as play at a time.

    The first episodes begin at random times within `spread_s` seconds. An episode has `turns` turns, and waits `wait_s`
    seconds after each. The waiting environment gives rewards.

    Attributes:
        shares: ideal / actual seconds of each episode, where the ideal is the sum of its waits and its steps.
        most_alive: largest number of episodes that played at one time.
        cpu_s: CPU seconds of all episodes.
    """

    episodes: int
    step_s: float = 0.005
    tokens: int = 8
    turns: int = 3
    wait_s: float = 0.1
    spread_s: float = 0.4
    is_remote: bool = True
    rounds: int = 1
    max_alive: int = 512
    completions: list[SampledCompletion] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    most_alive: int = 0
    cpu_s: float = 0.0

    @property
    def mean_share(self) -> float:
        return sum(self.shares) / len(self.shares)

    async def make(self) -> Environment:
        """Makes the environment of an episode."""
        self.most_alive = max(self.most_alive, self._player.num_alive)
        return WaitingEnvironment(self.turns, self.wait_s)

    async def close(self) -> None:
        """Does nothing."""

    def run(self) -> None:
        clock, answer = VirtualClock(), [*[30] * (self.tokens - 1), EOS]
        engine = VirtualEngine(clock, self.step_s, self.tokens, self.is_remote, answer)
        with clock.loops():
            loop = EngineLoop(engine, timeout=1e9, wait_timeout=1e9)  # type: ignore[arg-type]
        rollout = make_group_rollout(
            loop,
            RecordingRewards(),
            1,
            Sampling(max_tokens=self.turns * (self.tokens + 16)),
            tokenizer=AutoTokenizer.from_pretrained(QUICKSTART),
            environments=self,
            limits=replace(EPISODE_LIMITS, alive=self.max_alive),
        )
        assert rollout.player is not None
        self._player, examples = rollout.player, addition_examples(self.episodes)
        prompts = [rollout.encoder.encode(example) for example in examples]

        async def play(number: int) -> None:
            chance = random.Random(number)
            with loop.outside_engine():
                await asyncio.sleep(chance.uniform(0, self.spread_s))
            request = rollout.make_request(prompts[number], number)
            for _ in range(self.rounds):
                began = clock.seconds
                self.completions += await rollout.generate(request, examples[number])
                ideal = self.turns * (self.wait_s + self.tokens * self.step_s)
                self.shares.append(ideal / (clock.seconds - began))

        began = time.thread_time()
        loop.run_all([play(number) for number in range(self.episodes)])
        self.cpu_s = time.thread_time() - began
        loop.close()
