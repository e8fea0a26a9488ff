"""What a push carries: names, merged adapters, dtypes."""

import pytest
import torch

from config.errors import ConfigError
from rollout.weights.outgoing import Outgoing, adapter_weights, named_weights
from tests.rollout.conftest import lora_policy, tiny_llama

IDS = torch.arange(3, 40)[None]


def test_all_names_of_a_plain_model_with_its_tied_head(tied: bool) -> None:
    model = tiny_llama(tied)
    weights = dict(named_weights(model))
    assert set(weights) == set(model.state_dict())
    assert "lm_head.weight" in weights
    assert all(not tensor.requires_grad for tensor in weights.values())


def test_lora_is_merged_and_the_policy_left_alone(tied: bool) -> None:
    policy, plain = lora_policy(tied), tiny_llama(tied)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights = dict(named_weights(policy))
    assert set(weights) == set(plain.state_dict())
    changed = {name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, weights[name])}
    assert changed == {
        f"model.layers.{i}.{m}.weight" for i in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")
    }
    plain.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, policy(IDS).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_fully_trained_modules_beside_lora_travel_under_their_own_name() -> None:
    policy, plain = lora_policy(modules_to_save=["lm_head"]), tiny_llama(False)
    with torch.no_grad():
        policy.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    weights = dict(named_weights(policy))
    assert set(weights) == set(plain.state_dict())
    torch.testing.assert_close(weights["lm_head.weight"], 2 * plain.lm_head.weight)


def test_dora_is_refused() -> None:
    with pytest.raises(ConfigError, match="DoRA"):
        list(named_weights(lora_policy(use_dora=True)))


def test_adapter_weights_are_the_adapter_alone() -> None:
    names = {name for name, _ in adapter_weights(lora_policy())}
    assert len(names) == 8
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in names)


def test_names_and_shapes_are_known_without_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = named_weights(lora_policy())
    expected = [(name, tuple(tensor.shape)) for name, tensor in weights]
    monkeypatch.setattr(
        "peft.tuners.lora.Linear.get_delta_weight", lambda *_: pytest.fail("a merge to learn a shape")
    )
    again = named_weights(lora_policy())
    assert [(part.name, tuple(part.source.shape)) for part in again.parts] == expected
    assert again.names == {name for name, _ in expected}


def test_a_push_can_be_repeated(tied: bool) -> None:
    weights = named_weights(lora_policy(tied))
    for (name, one), (again, other) in zip(weights, weights, strict=True):
        assert name == again
        assert torch.equal(one, other)


def test_a_cast_rounds_the_merged_weight_once() -> None:
    policy = lora_policy()
    exact = dict(named_weights(policy))
    for name, tensor in named_weights(policy).cast(torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))


def test_a_cast_leaves_whole_numbers_alone() -> None:
    weights = Outgoing.of([("count", torch.tensor(70_001)), ("w", torch.ones(2))]).cast(torch.bfloat16)
    assert [(name, tensor.dtype) for name, tensor in weights] == [
        ("count", torch.int64),
        ("w", torch.bfloat16),
    ]
