"""Runs the reproductions of docs/torchrl.md and checks that each fault of TorchRL remains."""

import re
import traceback
from importlib.metadata import version

import pytest
import torch

from tests.script_runner import ROOT

TEXT = (ROOT / "docs" / "torchrl.md").read_text(encoding="utf-8")
PREAMBLE, *_ = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
FAULTS = {
    title: block
    for title, body in SECTIONS.items()
    for block in re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
}
FIXED_UPSTREAM = "fixed upstream: remove it from docs/torchrl.md"


def test_the_page_is_for_the_installed_version() -> None:
    installed = version("torchrl").partition("+")[0]
    page_versions = set(re.findall(r"TorchRL (\d+(?:\.\d+)+)", TEXT))
    assert page_versions == {installed}, f"TorchRL {installed} is installed: check docs/torchrl.md again"


def test_every_fault_has_one_reproduction() -> None:
    assert len(FAULTS) == len(SECTIONS) - 1 == TEXT.count("```python") - 1
    assert list(SECTIONS)[-1] == "Parts of TorchRL that this project uses"


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_remains(title: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in FAULTS[title].splitlines() if line.strip()]
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert lines[-1].startswith("assert ")
    if "Ray" in title:
        request.getfixturevalue("local_ray")
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "torchrl_page"}
    page = f"docs/torchrl.md: {title}"
    with torch.random.fork_rng(devices=[]):
        exec(compile(PREAMBLE, "the preamble of docs/torchrl.md", "exec"), namespace)
        try:
            exec(compile(FAULTS[title], page, "exec"), namespace)
        except AssertionError as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            if frame.filename != page:
                raise
            pytest.fail(f"{FIXED_UPSTREAM}: {title}, line {frame.lineno} of its block")
