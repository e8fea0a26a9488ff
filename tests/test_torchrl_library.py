"""Runs the code of docs/library.md and checks that the model learns."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.script_runner import ROOT

TEXT = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.long
def test_the_code_of_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imports, loop, in_torchrl = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert all(line.startswith(("from ", "import ")) for line in imports.split("\n") if line)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 25
    (tmp_path / "library.py").write_text(imports + loop + in_torchrl)
    monkeypatch.chdir(ROOT)
    variables = runpy.run_path(str(tmp_path / "library.py"))
    printed_rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rewards = [float(row[1]) for row in printed_rows if len(row) == 3 and row[0].isdigit()]
    assert len(rewards) == 45
    assert sum(rewards[:5]) / 5 < 0.75 < 0.85 < sum(rewards[40:]) / 5  # learning continues with TorchRL
    assert variables["engine"].policy_version == 45
    stored = variables["buffer"][:]
    assert len(stored) == 1280 and len({len(row["tokens", "response"]) for row in stored.unbind(0)}) > 1
