"""Tests that a policy in training mode computes as in evaluation, except adapters' dropout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import grpo
from config.schema.errors import RunError
from config.schema.models import LoraConfig
from tests.architectures import ARCHITECTURES, save_tiny, tiny
from tests.script_runner import compose_run_config, read_metrics
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.training_mode import evaluation_mode, set_training_mode

NOISY = {
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "opt": {"dropout": 0.5, "layerdrop": 0.9, "attention_dropout": 0.5},
    "granite_swa": {"attention_dropout": 0.5},
    "llama": {"attention_dropout": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
    "mixtral": {"router_jitter_noise": 0.5, "attention_dropout": 0.5},
    "xglm": {"dropout": 0.5, "activation_dropout": 0.5, "layerdrop": 0.5},
    "falcon": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "biogpt": {"hidden_dropout_prob": 0.5, "layerdrop": 0.5},
}
IDS = torch.arange(3, 33)[None]


def noisy(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    entry = ARCHITECTURES[name]
    monkeypatch.setattr(
        "tests.architectures.ARCHITECTURES",
        {name: type(entry)(**(vars(entry) | {"fields": {**entry.fields, **NOISY[name]}}))},
    )
    return tiny(name)


def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NOISY)
def test_noise_of_a_config_is_off(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = noisy(name, monkeypatch)
    expected = logits(model)
    model.train()
    with torch.no_grad():
        assert not torch.allclose(logits(model), expected, atol=1e-4), "the library's own training mode has it"
    if checkpointing:
        model.gradient_checkpointing_enable()
    set_training_mode(model)
    for _ in range(2):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    logits(model).sum().backward()
    saved = vars(model.config)
    assert all(saved.get(field, value) == value for field, value in NOISY[name].items()), "in the saved config it stays"


def test_layers_recompute_their_activations() -> None:
    model, passes = tiny("llama"), []
    model.gradient_checkpointing_enable()
    set_training_mode(model)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    logits(model).sum().backward()
    assert len(passes) == 2


def test_the_adapters_own_dropout_stays() -> None:
    policy = add_lora(tiny("llama"), LoraConfig(enabled=True, dropout=0.5))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    set_training_mode(policy)
    assert not torch.allclose(logits(policy), logits(policy), atol=1e-4)
    with evaluation_mode(policy):
        torch.testing.assert_close(logits(policy), logits(policy), rtol=0, atol=0)
    assert not torch.allclose(logits(policy), logits(policy), atol=1e-4)


def test_a_run_in_lockstep_has_no_mismatch(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.3'))
    assert '"attention_dropout": 0.3' in path.read_text()
    small = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32", "optimizer.warmup_steps=0")
    with pytest.raises(RunError, match="nothing was learned"):  # by a model with random output
        run_job(compose_run_config(*small, f"model.name={path.parent}"), tmp_path / "run", grpo.train, LockstepRun)
    assert all(row["logprob_diff/max"] < 1e-4 for row in read_metrics(tmp_path / "run") if "logprob_diff/max" in row)
    assert '"attention_dropout": 0.3' in (tmp_path / "run" / "model" / "config.json").read_text()
