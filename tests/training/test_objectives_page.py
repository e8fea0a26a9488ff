"""Checks docs/objectives.md: fields, presets and the numbers of its example."""

import re
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from config.schema.policy import CHOICES, OBJECTIVES, PRESETS, PolicyConfig, load_policy
from torchgrpo.training.advantage import group_advantage
from torchgrpo.training.loss_terms import total_loss

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text()


def tensor(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def numbers(preset: str) -> tuple[str, str, str]:
    """Formats the first two advantages and the loss of the page's example."""
    policy = load_policy(preset, entropy_coef=0.0)
    first, second, *_ = group_advantage(policy, tensor([[1, 0, 0, 0]]))[0].tolist()
    loss, _ = total_loss(
        policy,
        log_prob=tensor([[-1.0, -0.5, -2.0], [-0.2, -1.5, 0.0]]),
        sample_log_prob=tensor([[-1.3, -0.4, -2.5], [-0.2, -0.5, 0.0]]),
        old_log_prob=tensor([[-1.2, -0.4, -1.0], [-0.2, -1.0, 0.0]]),
        ref_log_prob=tensor([[-1.1, -0.6, -1.9], [-0.3, -1.4, 0.0]]),
        advantage=tensor([[1.0], [-0.5]]),
        mask=tensor([[1, 1, 1], [1, 1, 0]]),
        entropy=tensor([[0.9, 0.3, 1.5], [0.2, 0.7, 0.0]]),
    )
    return f"{first:.6f}", f"{second:.6f}", f"{loss.item():.6f}"


def test_every_preset_is_a_row_with_its_numbers() -> None:
    for preset in sorted(path.stem for path in PRESETS.glob("*.yaml")):
        ending = " | ".join(numbers(preset))
        assert re.search(rf"\| `{preset}` \| [^|]+ \| {re.escape(ending)} \|", PAGE), f"{preset}: {ending}"


def test_every_field_and_every_value_is_named() -> None:
    for field in fields(PolicyConfig):
        assert f"`{field.name}`" in PAGE, field.name
    for key, values in {**CHOICES, "objective": OBJECTIVES.names}.items():
        for value in values:
            assert f"`{value}`" in PAGE, f"{key}={value}"


def test_the_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    scope: dict[str, object] = {}
    exec(code.group(1), scope)
    values = scope["numbers"]
    assert isinstance(values, dict)
    assert f"{values['ratio/mean']:.3f}" == "1.105"
    assert abs(values["ess"] - 1) < 1e-6
