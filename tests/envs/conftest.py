"""Shared fixtures: sandboxes, the quickstart's tokenizer, and test data of sentence rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.sandbox.sandbox import Sandbox
from tests.envs.sandbox_helpers import LIMITS, ROOT, SANDBOX_CASES


def _case_name(case: tuple[str, tuple[str, ...]]) -> str:
    return "-without-".join([case[0], *case[1]])


@pytest.fixture(scope="module", params=SANDBOX_CASES, ids=_case_name)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    level, without = request.param
    with Sandbox(level, LIMITS, without) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "torchgrpo" / "models" / "quickstart")


@pytest.fixture(scope="module")
def auto_sandbox() -> Iterator[Sandbox]:
    with Sandbox("auto", LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def own_punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses the sentence rules in the tests folder."""
    from envs.verifiers import sentences
    from tests.punkt import OWN_PUNKT, use_punkt

    use_punkt(OWN_PUNKT, tmp_path / "data", monkeypatch)
    yield
    sentences.load_punkt.cache_clear()
