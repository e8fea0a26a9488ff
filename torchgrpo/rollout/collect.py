"""Groups on demand: so many are begun together, and whoever wants them waits for all."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envs.group import Group
from envs.prompts import PromptQueue
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.generate import Generation

Result = TypeVar("Result")
Wants = Callable[[Group], bool]
"""Dynamic sampling: whether a group is worth training on."""
Tell = Callable[[str, int, int], None]
"""Told of a stage, how much of it is done, and of how much (0: not counted)."""


async def together(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of coroutines that run side by side, in their order."""
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


@dataclass(eq=False)
class Collector:
    """Collects groups in lockstep.

    Args:
        prompts: draws examples and learns how often they were solved.
        attempts: replacements for a group that is not wanted.
        tell: told how far a collection is, in groups.
    """

    loop: EngineLoop
    generation: Generation
    prompts: PromptQueue
    wants: Wants = lambda group: True
    attempts: int = 10
    tell: Tell = lambda stage, done, total: None

    def collect(self, num_groups: int) -> list[Group]:
        """New groups, in the order of their places.

        All that are not wanted are replaced together, by groups of new prompts, again and again up to `attempts` times;
        then they stay. A group knows those that it is in place of.
        """
        groups = self._round(num_groups)
        places = list(range(num_groups))
        for _ in range(self.attempts):
            places = [place for place in places if not self.wants(groups[place])]
            if not places:
                break
            for place, group in zip(places, self._round(len(places)), strict=True):
                group.in_place_of = groups[place]
                groups[place] = group
        return groups

    def _round(self, count: int) -> list[Group]:
        """Collect groups; scores and success are taken in the order of group ids."""
        drawn = 0

        def tell() -> None:
            nonlocal drawn
            drawn += 1
            self.tell("collect", drawn, count)
            if drawn == count:
                self.tell("score", 0, 0)

        begun = self.prompts.begin(count)
        groups = self.loop.run(
            together([self.generation.run_group(example, group_id, tell) for group_id, example in begun])
        )
        self.generation.lowest.settle(groups)
        for group in groups:
            self.prompts.observe(group.example, group.success_rate)
        return groups
