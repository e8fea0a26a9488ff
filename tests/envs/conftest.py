"""Sandboxes that the tests of a module share."""

from collections.abc import Iterator

import pytest

from envs.sandbox.sandbox import Sandbox
from tests.envs.sandboxes import LIMITS, SHUT_IN


def _name(case: tuple[str, tuple[str, ...]]) -> str:
    return "-without-".join([case[0], *case[1]])


@pytest.fixture(scope="module", params=SHUT_IN, ids=_name)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level, without = request.param
    with Sandbox(level, LIMITS, without) as made:
        yield made


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    with Sandbox("auto", LIMITS) as made:
        yield made
