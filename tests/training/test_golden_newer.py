"""Compares presets and fields to recorded losses, gradients and advantages of newer objectives."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.golden_newer import NEWER
from tests.training.golden_newer_advantages import newer_advantage
from tests.training.test_golden_loss import difference, load_inputs, run
from torchgrpo.training.trust_region import binary_kl_symmetric

GOLDEN = Path(__file__).resolve().parents[2] / ".." / "shared" / "golden"
TOLERANCE = 1e-8
MEASURE = "areal.utils.functional.functional.compute_binary_kl_divergence"
FLOAT32 = ("nemo_rl GRPOAdvantageEstimator.compute_advantage", 2e-8)
"""NeMo-RL corrects the deviation by a factor that it has in float32."""

needs_cases = pytest.mark.skipif(not GOLDEN.exists(), reason="the recorded cases are not beside this checkout")


def differs(case: dict[str, Any], inputs: dict[str, torch.Tensor]) -> str | None:
    """Returns the difference of a case, or None if our loss reproduces the case."""
    call = NEWER[case["function"].split()[0]](case["params"], inputs)
    loss, gradient, _ = run(call, inputs)
    wanted = float(case["expected"]["loss"])
    if math.isnan(wanted):  # verl divides 0 by 0 if all tokens are rejected; our gradient is 0
        return None if loss == 0 and not any(gradient) else f"NaN recorded, ours is {loss}"
    errors = [difference(gradient, case["grad_wrt_logp"])]
    if not _counts_empty_rows(case):
        errors.append(difference([loss], [wanted]))
    if max(errors) <= max(TOLERANCE, case["rtol"]):
        return None
    return f"{case['function']} {case['inputs']} {case['params']}: off by {errors}"


def _counts_empty_rows(case: dict[str, Any]) -> bool:
    """Whether a case counts rows without selected tokens.

    TRL's GMPO adds the constant -A, without gradient, for such a row.
    """
    return "gmpo" in case["function"] and "top_entropy_quantile" in case["params"]


@needs_cases
def test_every_recorded_loss() -> None:
    recorded = json.loads((GOLDEN / "loss2.json").read_text())
    inputs = {name: load_inputs(value) for name, value in recorded["inputs"].items()}
    compared, ill_posed, wrong = 0, 0, []
    for case in recorded["cases"]:
        if case["function"].startswith(MEASURE):
            continue
        found = differs(case, inputs[case["inputs"]])
        if case.get("ill_posed"):  # probabilities above 1
            ill_posed += 1
        else:
            compared += 1
            wrong += [found] if found else []
    print(f"{compared - len(wrong)} of {compared} reproduced; {ill_posed} apart")
    assert compared > 900
    assert not wrong, f"{len(wrong)} cases differ:\n" + "\n".join(wrong[:40])


@needs_cases
def test_the_recorded_measure() -> None:
    """Compares AReaL's statistic alone, summed over the tokens."""
    recorded = json.loads((GOLDEN / "loss2.json").read_text())
    cases = [case for case in recorded["cases"] if case["function"].startswith(MEASURE)]
    assert cases
    for case in cases:
        inputs = load_inputs(recorded["inputs"][case["inputs"]])
        measured = binary_kl_symmetric(inputs["old"], inputs["inf"])[inputs["mask"].bool()].sum()
        if not case.get("ill_posed"):
            assert measured.item() == pytest.approx(float(case["expected"]["loss"]), rel=1e-9)


def _negative_mean(case: dict[str, Any]) -> bool:
    """Whether a case divides by a negative mean.

    SkyRL's MaxRL then flips the sign; prime-rl and this code return 0 for such a group.
    """
    return "skyrl" in case["function"] and any(sum(row) < 0 for row in case["rewards"])


@needs_cases
def test_every_recorded_advantage() -> None:
    recorded = json.loads((GOLDEN / "advantage2.json").read_text())
    wrong, compared = [], 0
    for case in recorded["cases"]:
        found = newer_advantage(case)
        if found is None:
            continue
        compared += 1
        ours, wanted = found
        scale = max(wanted.abs().max().item(), 1e-12)
        error = ((ours - wanted).abs().max() / scale).item()
        tolerance = FLOAT32[1] if case["function"] == FLOAT32[0] else TOLERANCE
        if not error <= max(tolerance, case["rtol"]) and not _negative_mean(case):
            wrong.append(f"{case['function']} {case['algo']} {case['rewards_name']} {case['params']}: {error:.1e}")
    print(f"{compared - len(wrong)} of {compared} reproduced")
    assert not wrong, f"{len(wrong)} cases differ:\n" + "\n".join(wrong[:40])
