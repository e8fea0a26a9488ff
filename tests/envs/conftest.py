"""Sandboxes and the tokenizer that the tests of a module share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.sandbox.sandbox import Sandbox
from tests.envs.sandboxes import LIMITS, ROOT, SHUT_IN


def _name(case: tuple[str, tuple[str, ...]]) -> str:
    return "-without-".join([case[0], *case[1]])


@pytest.fixture(scope="module", params=SHUT_IN, ids=_name)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level, without = request.param
    with Sandbox(level, LIMITS, without) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "torchgrpo" / "models" / "quickstart")


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    with Sandbox("auto", LIMITS) as made:
        yield made


@pytest.fixture
def own_punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sentences are cut by rules that lie among the tests."""
    from envs.verifiers import sentences
    from tests.punkt import OWN_PUNKT, use_punkt

    use_punkt(OWN_PUNKT, tmp_path / "data", monkeypatch)
    yield
    sentences.load.cache_clear()
