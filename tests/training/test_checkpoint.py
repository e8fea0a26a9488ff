"""The global generators of a checkpoint on a machine with other devices. Runs that resume are in tests/test_grpo.py."""

import os
from pathlib import Path

import pytest
import torch

from config.errors import ConfigError
from training.checkpoint import load_checkpoint, random_state, restore_random_state


@pytest.mark.parametrize("there", [0, 1, 3])
def test_generators_of_gpus_that_are_gone_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """No GPU is here: the calls that would reach one are recorded."""
    restored: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.update({device: int(state[0])})
    )
    saved = random_state() | {"cuda": [torch.tensor([7]), torch.tensor([8])]}
    expected = torch.rand(3)
    restore_random_state(saved)
    assert restored == {device: 7 + device for device in range(min(there, 2))}
    assert torch.equal(torch.rand(3), expected)


class Hostile:
    """Unpickling it would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save({"iteration": Hostile(tmp_path / "made")}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "made").exists()
