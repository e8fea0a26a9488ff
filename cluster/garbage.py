"""Python's search for garbage, so that it does not go through what is none: imports, and groups that wait."""

import atexit
import gc
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType

_YOUNG = 50_000
"""Objects that may be made before the newest are looked through. A batch of groups is thousands of objects and no
garbage: at Python's own 700 looking through them costs 3% of a small run."""
_spared = False


def spare_what_stays() -> None:
    """What imports left behind is never looked through, and new objects seldom.

    Without the first, the search costs 5% of a small run. Called before anything of a run is made; of a process that
    has built a run before, after the garbage of that one is gone.
    """
    global _spared
    if _spared:  # `gc.get_freeze_count()` counts them one by one: 70 ms for a million
        gc.collect()
    gc.freeze()
    search_seldom()
    _spared = True


def search_seldom() -> None:
    """Objects are looked through once there are more new ones than Python has it.

    A command does this before it imports: at Python's own pace the search takes half a second of its four.
    """
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def imported_apart(name: str) -> ModuleType:
    """The module, imported with no frame of the caller's below: packages keep exceptions of what they could not import,
    each of which keeps all frames that it was raised in, and so a run with its model after its end."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


def freeze_imports() -> None:
    """What there is now is never looked through again. Where the search is on, once before: what a notebook has dropped
    may hold a GPU's memory. Whoever builds a run or an engine's process has switched it off."""
    if gc.isenabled():
        gc.collect()
    gc.freeze()


@contextmanager
def imports_stay_frozen() -> Iterator[None]:
    """What is frozen stays so meanwhile, and nothing else is frozen.

    vLLM freezes all that there is once an engine has started. As the engine ends, it thaws all, to look twice for what
    was the engine's: a second, in a million objects of imports. So an engine's own are never frozen.
    """
    freeze, thaw = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, thaw


def end_without_a_search() -> None:
    """Spares the search with which the interpreter ends, through all that was ever imported."""
    atexit.register(gc.freeze)
