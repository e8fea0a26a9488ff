"""Hostile functions as agents: the column `trick` of the example names a trick."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.hostile_agents import is_first, status


class Strange:
    """Object whose text cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def recurse() -> Any:
    return recurse()


def leave_thread() -> float:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return 0.5


def search_objects() -> float:
    answer = os.environ["REVERSED"][::-1]
    return float(any(answer in str(each) for each in gc.get_objects() if isinstance(each, dict | list | tuple | str)))


def raise_text() -> Any:
    raise KeyboardInterrupt("\udcff" + "x" * 10**6)


FUNCTION_TRICKS: dict[str, Callable[[], Any]] = {
    "differs": is_first,
    "raises": lambda: 1 / 0,
    "exits": lambda: sys.exit(0),
    "exits_3": lambda: sys.exit(3),
    "ends": lambda: os._exit(0),
    "recurses": recurse,
    "thread": leave_thread,
    "searches": search_objects,
    "interrupt": raise_text,
    "strange": Strange,
    "text": lambda: "x" * 10**6,
    "components": lambda: (1.0, {f"name {number}" * 20: 1.0 for number in range(2000)}),
}


def play(example: Any) -> Any:
    """Asks for one turn, then performs a trick of `FUNCTION_TRICKS`."""
    assert status() == 200
    return FUNCTION_TRICKS[example.row_data["trick"]]()


print('{"reward": 1000}', flush=True)  # output of the import
