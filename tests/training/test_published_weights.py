"""Published tensors of the policy: names, merged adapters, dtypes."""

import pytest
import torch

from config.schema.errors import ConfigError
from tests.rollout.conftest import lora_policy, tiny_llama
from torchgrpo.training.published_weights import PolicyTensor, adapter_weights, make_tensors, named_weights

IDS = torch.arange(3, 40)[None]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_all_names_of_a_plain_model_with_its_tied_head(tied: bool) -> None:
    model = tiny_llama(tied)
    weights = make_tensors(named_weights(model))
    assert set(weights) == set(model.state_dict())
    assert "lm_head.weight" in weights
    assert all(not tensor.requires_grad for tensor in weights.values())


def test_lora_is_merged_and_the_policy_left_alone(tied: bool) -> None:
    policy, plain = lora_policy(tied), tiny_llama(tied)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights = make_tensors(named_weights(policy))
    assert set(weights) == set(plain.state_dict())
    changed = {name for name, tensor in plain.state_dict().items() if not torch.equal(tensor, weights[name])}
    assert changed == {f"model.layers.{i}.{m}.weight" for i in (0, 1) for m in ("self_attn.q_proj", "mlp.down_proj")}
    plain.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, policy(IDS).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_fully_trained_modules_beside_lora_travel_under_their_own_name() -> None:
    policy, plain = lora_policy(modules_to_save=["lm_head"]), tiny_llama(False)
    with torch.no_grad():
        policy.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    weights = make_tensors(named_weights(policy))
    assert set(weights) == set(plain.state_dict())
    torch.testing.assert_close(weights["lm_head.weight"], 2 * plain.lm_head.weight)


def test_dora_is_refused() -> None:
    with pytest.raises(ConfigError, match="DoRA"):
        named_weights(lora_policy(use_dora=True))


def test_adapter_weights_are_the_adapter_alone() -> None:
    names = {tensor.name for tensor in adapter_weights(lora_policy())}
    assert len(names) == 8
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in names)


def test_names_and_shapes_are_known_without_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        (tensor.name, tuple(tensor.make().shape), tensor.make().dtype)
        for tensor in named_weights(lora_policy(), torch.bfloat16)
    ]
    monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda *_: pytest.fail("a merge to learn a shape"))
    again = named_weights(lora_policy(), torch.bfloat16)
    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in again] == expected


def test_a_push_can_be_repeated(tied: bool) -> None:
    weights = named_weights(lora_policy(tied))
    for name, one in make_tensors(weights).items():
        assert torch.equal(one, make_tensors(weights)[name])


def test_a_cast_rounds_the_merged_weight_once() -> None:
    policy = lora_policy()
    exact = make_tensors(named_weights(policy))
    for name, tensor in make_tensors(named_weights(policy, torch.bfloat16)).items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))


def test_a_cast_leaves_whole_numbers_alone() -> None:
    model = torch.nn.BatchNorm1d(2)
    dtypes = {tensor.name: tensor.dtype for tensor in named_weights(model, torch.bfloat16)}
    assert dtypes["num_batches_tracked"] == torch.int64
    assert dtypes["running_mean"] == dtypes["weight"] == torch.bfloat16


def test_a_tied_tensor_has_one_identity_and_no_other_shares_it(tied: bool) -> None:
    tensors: dict[str, PolicyTensor] = {tensor.name: tensor for tensor in named_weights(tiny_llama(tied))}
    head, embeddings = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    assert (head.identity == embeddings.identity) == tied
    assert len({tensor.identity for tensor in tensors.values()}) == len(tensors) - tied
