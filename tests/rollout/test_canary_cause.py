"""Which temperature an engine answers as at."""

import pytest
import torch

from rollout.weights.canary_cause import _temperature
from rollout.weights.evidence import Evidence

TOKENS = 400


def log_probs(temperature: float, sharpness: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(TOKENS, 300, dtype=torch.float64, generator=generator)
    return (logits / temperature).log_softmax(-1)[:, 0]


def evidence(engine: torch.Tensor, sharpness: float) -> Evidence:
    return Evidence(engine, log_probs(1.0, sharpness), torch.zeros(TOKENS, dtype=torch.bool))


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("temperature", [0.25, 0.7, 0.95, 1.05, 1.5, 3.0, 4.5])
def test_a_temperature_is_found_in_few_passes(sharpness: float, temperature: float) -> None:
    passes: list[float] = []

    def learner_at(at: float) -> torch.Tensor:
        passes.append(at)
        return log_probs(at, sharpness)

    seen = evidence(log_probs(temperature, sharpness), sharpness)
    assert _temperature(seen, learner_at) == pytest.approx(temperature, rel=0.01)
    assert len(passes) <= 12


@pytest.mark.parametrize("fault", [1.0, 0.01])
def test_other_faults_are_no_temperature(fault: float) -> None:
    noise = torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = evidence(log_probs(1.0, 1.0) + fault * noise, 1.0)
    assert _temperature(seen, lambda at: log_probs(at, 1.0)) is None
