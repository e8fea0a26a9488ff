"""Compares presets to recorded losses and gradients of six systems."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.golden_mapping import MAPPINGS, Inputs, LossCall, tensor_sum
from torchgrpo.training.loss_metrics import finalize_metrics
from torchgrpo.training.loss_terms import total_loss

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden" / "loss.json"
TOLERANCE = 1e-8
NOT_COVERED: dict[str, str] = {}
"""Case -> why its recorded behaviour is undefined. Empty: every case is reproduced."""


def load_inputs(recorded_inputs: dict[str, Any]) -> Inputs:
    return {
        name: torch.tensor(value["data"], dtype=torch.float64).reshape(value["shape"])
        for name, value in recorded_inputs.items()
        if isinstance(value, dict)
    }


def run(call: LossCall, inputs: Inputs) -> tuple[float, list[float], dict[str, float]]:
    log_prob = inputs[call.log_prob].clone().requires_grad_()
    loss, metrics = total_loss(
        call.policy,
        log_prob,
        inputs[call.sample],
        inputs[call.old],
        inputs[call.ref],
        call.advantage,
        call.mask,
        totals=call.totals,
        entropy=inputs.get("ent"),
        environment=call.environment,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad.flatten().tolist(), finalize_metrics(metrics)


def metrics_differ(case: dict[str, Any], call: LossCall, numbers: dict[str, float]) -> list[str]:
    """Returns the names of recorded metrics that ours do not reproduce."""
    expected, function = case["expected"], case["function"]
    tokens, positions = call.mask.sum().item(), call.mask.numel()
    clipped = numbers["loss/clip_fraction_low"] + numbers["loss/clip_fraction_high"]
    comparable: dict[str, tuple[float, float]] = {}
    if "coati" in function and case["params"].get("loss_mask", "ones") == "ones":
        # the recorded maximum includes dropped samples, and padding with a ratio of 1
        ours = max(numbers["ratio/max"], 1.0) if tokens < positions else numbers["ratio/max"]
        comparable["ratio_max"] = (ours, expected["ratio_max"])
    if "skip" in expected:  # the recorded mean includes padding
        mean = (numbers["ratio/mean"] * tokens + positions - tokens) / positions
        comparable["skip"] = (mean > case["params"]["skip_threshold"], expected["skip"])
    if function.endswith("vanilla"):
        comparable["pg_clipfrac"] = (clipped, expected["actor/pg_clipfrac"])
    if "megatron" in function:
        comparable["kl_term"] = (numbers["kl/ref"] * tokens, tensor_sum(expected["kl_term"]))
        comparable["entropy_term"] = (numbers["entropy"] * tokens, tensor_sum(expected["entropy_term"]))
        comparable["ratios"] = (numbers["ratio/mean"] * tokens, tensor_sum(expected["ratios"]))
    if "torchrl" in function:  # the recorded mean includes padding
        comparable["kl_to_ref"] = (numbers["kl/ref"] * tokens / positions, expected["kl_to_ref"])
    return [name for name, (ours, theirs) in comparable.items() if ours != pytest.approx(theirs, rel=1e-7)]


def difference(ours: list[float], recorded_values: list[float]) -> float:
    """Returns the largest difference relative to the largest recorded number."""
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(recorded_values, dtype=torch.float64)
    scale = max(b.abs().max().item(), 1e-12)
    return ((a - b).abs().max() / scale).item()


@pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded cases are not beside this checkout")
def test_every_recorded_case() -> None:
    golden = json.loads(GOLDEN.read_text())
    inputs = {name: load_inputs(value) for name, value in golden["inputs"].items()}
    wrong: list[str] = []
    for index, case in enumerate(golden["cases"]):
        label = f"{index} {case['function']} {case['inputs']} {case['params']}"
        if label in NOT_COVERED:
            print(f"not covered: {label}: {NOT_COVERED[label]}")
            continue
        these = inputs[case["inputs"]]
        call = MAPPINGS[case["function"].split()[0]](case["params"], these)
        loss, gradient, numbers = run(call, these)
        errors = (
            difference([loss], [call.expected_loss(case["expected"])]),
            difference(gradient, case["grad_wrt_logp"]),
        )
        if not max(errors) <= TOLERANCE:
            wrong.append(f"{label}: loss off by {errors[0]:.1e}, gradient by {errors[1]:.1e}")
        wrong += [f"{label}: {name} differs" for name in metrics_differ(case, call, numbers)]
    print(f"{len(golden['cases']) - len(wrong) - len(NOT_COVERED)} of {len(golden['cases'])} reproduced")
    assert not wrong, f"{len(wrong)} cases differ:\n" + "\n".join(wrong[:40])
