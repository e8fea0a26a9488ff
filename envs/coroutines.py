"""Several coroutines at once, of which none outlives the failure of another."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What they return, in their order. What the first one raises is raised, and the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
