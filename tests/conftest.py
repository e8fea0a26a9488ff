"""Shared by all tests: one thread, no hub, the same properties at each run, the order, imports that no search for
garbage goes through, and a Ray for a module."""

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.costs import ENGINE, SLOW
from tests.forked import SERVED_AT, start_server
from tests.logged import Logged

HERE = Path(__file__).parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell starts its background jobs; every process that a test interrupts would have that from us.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the files that tests/costs.py has no row for")
    parser.addoption(
        "--costs", action="store_true", help="print the seconds of each file, for tests/costs.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before it starts others, the process that shares tests out starts what all their scripts are forked from."""
    shares = config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if shares and sys.platform == "linux":
        os.environ[SERVED_AT] = start_server(os.environ)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is not collected is not imported either."""
    name = file_of(collection_path)
    left_out = config.getoption("--quick") and (name in ENGINE or name in SLOW or name == "gpu")
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start engines and files that compute take turns, in either kind the longest first: what runs side by
    side needs different things, and no long file is left for the end."""
    place = {name: number for number, name in enumerate(in_turns(ENGINE, SLOW))}
    for item in items:
        name = file_of(item.path)
        if name in ENGINE:
            item.add_marker(pytest.mark.engine)
        elif name in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: place.get(file_of(item.path), len(place)))


def pytest_collection_finish() -> None:
    if "ray" in sys.modules:  # of tests that may start it
        from tests.scripts import fork_ray

        fork_ray()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Of test processes, and of the one that shares tests out."""
    _freeze()
    gc.enable()


KEPT = 200
"""Modules whose import is worth a freeze."""
_freeze = gc.freeze
_frozen_at: tuple[Path, int] | None = None
# vLLM freezes at each start of an engine and thaws all at its end: then it looks for garbage twice, in a million
# objects of imports, which takes a second.
gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is there between two files, or has been imported, is no garbage: freeze it, before the test makes anything.

    Runs look for garbage as they begin, and else would go through all that earlier files have left.
    """
    global _frozen_at
    now = item.path, len(sys.modules) // KEPT
    if now != _frozen_at:
        gc.collect()
        _freeze()
        _frozen_at = now


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """pytest and the interpreter look for garbage six times as they end: this once is enough."""
    gc.collect()
    _freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("--costs"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[file_of(terminalreporter.config.rootpath / report.fspath)] += report.duration
    for name, spent in sorted(seconds.items(), key=lambda row: -row[1]):
        terminalreporter.line(f"{spent:7.1f}  {name}")


def file_of(path: Path) -> str:
    """As tests/costs.py names it."""
    return path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.name


def in_turns(*kinds: dict[str, int]) -> list[str]:
    """The names of all kinds, so that each prefix has about the same share of the cost of every kind."""
    shares: list[tuple[float, str]] = []
    for costs in kinds:
        done = 0
        for name in sorted(costs, key=lambda name: -costs[name]):
            shares.append((done / sum(costs.values()), name))
            done += costs[name]
    return [name for _, name in sorted(shares)]


@pytest.fixture
def logged() -> Iterator[Logged]:
    root, handler = logging.getLogger(), Logged()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.fixture(scope="module")
def prepared_vllm() -> None:
    """Engines of vLLM that start in this process start sooner."""
    from tests.vllm_once import prepare_vllm

    prepare_vllm()


@pytest.fixture(scope="module")
def vllm_in_workers() -> Iterator[None]:
    """To be asked for before `local_ray`."""
    from tests import scripts

    with scripts.vllm_in_workers():
        yield


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    from cluster.runtime import start_ray

    start_ray(None, num_cpus=8)
    yield
    ray.shutdown()
