"""Adapters on a base in 4 bits: quantization, training, pushes, checkpoints."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from config.schema.errors import ConfigError
from config.schema.models import LoraConfig, ModelConfig
from tests.local_policy import LocalPolicy, check_plan
from tests.tiny_models import EOS, tiny_llama
from tests.training.test_packed_sequence import rows, score_with_gradient
from torchgrpo.plan.model_shape import quantized_bytes, read_shape
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.rollout.weights.weight_pusher import WeightPusher
from torchgrpo.training.adapters import add_lora
from torchgrpo.training.model_loading import load_in_4bit, load_model
from torchgrpo.training.published_weights import PolicyWeights, make_tensors, named_weights
from torchgrpo.training.quantization import dequantize_weight, is_quantized
from torchgrpo.training.trained_parameters import base_digest, trained_tensors

pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")

CPU = torch.device("cpu")
LORA = LoraConfig(enabled=True, r=4, quantization="nf4")
DTYPES = [torch.float32, torch.bfloat16]


def nf4_levels() -> torch.Tensor:
    """Returns the levels of nf4 (arXiv 2305.14314, section 3).

    They are quantiles of a normal distribution, seven below and eight above an exact 0.
    """
    below, above = (
        torch.special.ndtri(torch.linspace(0.9677083, 0.5, count, dtype=torch.float64))[:-1] for count in (8, 9)
    )
    return torch.cat([-below, torch.zeros(1), above.flip(0)]) / above.max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return folder


def policy_on(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Builds a policy on the base in 4 bits, with adapters that change every output."""
    model = load_in_4bit(ModelConfig(name=str(folder), dtype=str(dtype).removeprefix("torch.")), CPU, dtype)
    torch.manual_seed(5)
    return add_noise(add_lora(model, LORA), 0.1)


def add_noise(policy: nn.Module, size: float) -> nn.Module:
    """Adds noise to the adapters of a policy."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(size * torch.randn(parameter.shape))
    return policy


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_linear_layers_but_the_head_are_in_4_bits(folder: Path, dtype: torch.dtype) -> None:
    named = dict(policy_on(folder, dtype).named_parameters())
    small = {name for name, parameter in named.items() if is_quantized(parameter)}
    assert small == {name for name in named if name.endswith("proj.base_layer.weight")} and small
    adapters = {name for name, parameter in named.items() if parameter.requires_grad}
    assert adapters == {name for name in named if "lora_" in name}
    assert {named[name].dtype for name in adapters} == {dtype}
    assert {parameter.dtype for name, parameter in named.items() if name not in small | adapters} == {dtype}


def test_each_value_is_the_nearest_level_of_its_block(folder: Path) -> None:
    """Compared with nf4 in float64; 8-bit scales change values by a few percent at most."""
    exact = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].double()
    layer = load_in_4bit(ModelConfig(name=str(folder)), CPU, torch.float32).model.layers[0].mlp.up_proj
    blocks, levels = exact.reshape(-1, 64), nf4_levels()
    scale = blocks.abs().amax(1, keepdim=True)
    distance, order = (blocks[..., None] / scale[..., None] - levels).abs().sort(dim=-1)
    clear = distance[..., 1] - distance[..., 0] > 2e-4
    assert clear.double().mean() > 0.99
    nearest, ours = (levels[order[..., 0]] * scale, dequantize_weight(layer.weight, layer).double().reshape(-1, 64))
    torch.testing.assert_close(ours[clear], nearest[clear], rtol=0.06, atol=1e-4)


def test_the_base_takes_what_the_plan_says(folder: Path) -> None:
    model = load_in_4bit(ModelConfig(name=str(folder)), CPU, torch.float32)
    scales = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantized(module.weight):
            state = module.weight.quant_state  # type: ignore[attr-defined]  # bitsandbytes sets it
            scales += state.absmax.nbytes + state.state2.absmax.nbytes
    total_bytes = sum(parameter.nbytes for parameter in model.parameters()) + scales
    planned = quantized_bytes(read_shape(folder / "config.json"), 4)
    assert planned <= total_bytes <= planned + 4 * 14, "the last scale of each of the 14 matrices is for fewer"
    assert planned < 0.4 * sum(parameter.nbytes for parameter in tiny_llama().parameters())


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_on_the_dequantized_base(folder: Path, packs: bool, checkpointing: bool) -> None:
    policy = policy_on(folder)
    dequantized = tiny_llama()
    dequantized.load_state_dict(dequantized_base(folder), strict=False)
    torch.manual_seed(5)
    other = add_noise(add_lora(dequantized, LoraConfig(enabled=True, r=4)), 0.1)
    if checkpointing:
        policy.get_base_model().gradient_checkpointing_enable()
    ours, theirs = (score_with_gradient(one.train(), packs, rows()) for one in (policy, other))
    torch.testing.assert_close(ours[0].log_prob, theirs[0].log_prob, rtol=1e-4, atol=1e-4)
    assert (ours[1] - theirs[1]).norm() < 1e-4 * theirs[1].norm()


def dequantized_base(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the base, out of 4 bits."""
    model = load_in_4bit(ModelConfig(name=str(folder)), CPU, torch.float32)
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    return {f"{name}.weight": dequantize_weight(layer.weight, layer).detach() for name, layer in layers}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_push_is_the_base_out_of_4_bits_and_the_adapter(folder: Path, dtype: torch.dtype) -> None:
    policy = policy_on(folder, dtype)
    tensors = named_weights(policy, dtype)
    assert [(one.name, one.shape, one.dtype) for one in tensors] == [
        (name, tuple(tensor.shape), dtype) for name, tensor in tiny_llama().state_dict().items()
    ]
    plain = load_model(ModelConfig(name=str(folder), dtype=str(dtype).removeprefix("torch.")), CPU)
    plain.load_state_dict(make_tensors(tensors))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        tolerance = 1e-3 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(plain(ids).logits, policy.eval()(ids).logits, atol=tolerance, rtol=tolerance)
    sequences = [ids[0].tolist()]
    learner = PolicyWeights(policy, partial(named_weights, dtype=dtype))
    scores, expected = learner.score(sequences)[0], PolicyWeights(plain, named_weights).score(sequences)[0]
    assert scores == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pushes_pass_the_weight_check_and_lost_ones_do_not(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, kind = policy_on(folder, dtype), str(dtype).removeprefix("torch.")
    engine = TransformersEngine(load_model(ModelConfig(name=str(folder), dtype=kind), CPU), (EOS,))
    learner = LocalPolicy(policy, partial(named_weights, dtype=dtype))
    # bfloat16 rounds on both sides, and log-probs of so few tokens are small.
    bounds = kind if dtype == torch.float32 else "fp8"
    weights = WeightPusher(learner, engine, WeightCheck(check_plan(bounds, length=40), engine, learner))
    for size in (0.0, 1e-5, 1e-3, 0.1):
        add_noise(policy, size)
        weights.push()
        assert weights.check_push()
    monkeypatch.setattr(engine, "load", lambda weights, version: None)
    add_noise(policy, 0.1)
    weights.push()
    with pytest.raises(WeightMismatch, match="Cause: old weights"):
        weights.check_push()


def test_a_checkpoint_holds_adapters_and_knows_its_base(folder: Path, tmp_path: Path) -> None:
    policy = policy_on(folder)
    assert trained_tensors(policy) and all("lora_" in name for name in trained_tensors(policy))
    assert base_digest(policy) == base_digest(policy_on(folder))
    assert base_digest(policy) != base_digest(add_lora(tiny_llama(), LORA))
    tiny_llama(seed=1).save_pretrained(tmp_path)
    assert base_digest(policy) != base_digest(policy_on(tmp_path))


def test_scoring_leaves_a_base_that_trains(folder: Path) -> None:
    """Some CPU kernels would reorder the weights to an order without a backward pass."""
    policy = policy_on(folder)
    PolicyWeights(policy, named_weights).score([[3, 4, 5]])
    with torch.no_grad():
        before = policy.eval()(torch.arange(3, 30)[None]).logits
    after = policy.train()(torch.arange(3, 30)[None]).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    after.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        load_in_4bit(ModelConfig(name=str(broken)), CPU, torch.float32)


def test_the_saved_config_has_no_quantization(folder: Path, tmp_path: Path) -> None:
    load_in_4bit(ModelConfig(name=str(folder)), CPU, torch.float32).config.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
