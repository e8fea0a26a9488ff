"""Tests sizes of models known by name, and of mixtures of experts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import kv_bytes_per_sequence
from torchgrpo.plan.model_shape import find_shape, make_shape
from torchgrpo.plan.problems import find_problems

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "google/gemma-3-1b-it": 302_000_000 + 698_000_000,
    "google/gemma-3-4b-it": 675_000_000 + 3_209_000_000,
    "google/gemma-3-12b-pt": 1_012_000_000 + 10_759_000_000,
    "google/gemma-3-27b-it": 1_416_000_000 + 25_600_000_000,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
}
"""Parameters that the model cards and safetensors files state; of Gemma 3 those of the text part in its report."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "olmoe", "granitemoe", "solar_open")


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_equal_the_published_number(name: str) -> None:
    shape = find_shape(name)
    assert shape is not None
    assert shape.parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_the_parameters_of_its_class(name: str) -> None:
    """transformers accepts the fields, and its own count is that of the plan."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**KNOWN_MODELS[name]))
    shape = find_shape(name)
    assert shape is not None
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=0.001)


def test_experts_of_a_token() -> None:
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    assert shape is not None
    active = shape.active_linear_parameters + 2 * shape.head_parameters
    assert active == pytest.approx(3.3e9, rel=0.02), "the card's 3.3 billion activated parameters"


@pytest.mark.parametrize("kind", MIXTURES)
def test_parameters_of_a_mixture_of_experts(kind: str) -> None:
    lines = Path("tests/fixtures/data/architectures.jsonl").read_text().splitlines()
    fields = next(one["fields"] for one in map(json.loads, lines) if one["name"] == kind)
    config = AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = make_shape(config.to_dict(), kind)
    assert (shape.num_experts, shape.active_experts) == (4, 2)
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()), rel=0.01)


def test_a_sparse_config_file_of_gemma() -> None:
    """The file of the model with images names neither the vocabulary nor the heads."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = make_shape({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}}, "gemma")
    known = find_shape("google/gemma-3-4b-it")
    assert known is not None
    assert (shape.parameters, shape.tied, shape.gated_mlp) == (known.parameters, True, True)


def test_the_cache_of_layers_with_a_window() -> None:
    """Gemma 3 has five layers with a window for one layer without."""
    shape = find_shape("google/gemma-3-27b-it")
    assert shape is not None and (shape.window, shape.windowed_layers) == (1024, 52)
    token = 2 * 16 * 128 * 2  # keys and values of a layer in bfloat16
    config = config_of("grpo_gsm8k", "inference_model.max_tokens=7680", "env.max_prompt_tokens=512")
    assert kv_bytes_per_sequence(config, shape, "bfloat16") == token * (10 * 8192 + 52 * 1024)
    assert shape.kv_bytes(100, 2) == token * 62 * 100


@pytest.mark.parametrize("name", ["Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-3-1b-it"])
def test_a_plan_without_files(name: str) -> None:
    plan = make_plan(config_of("grpo_gsm8k", f"model.name={name}"), False, machine(2, 80.0))
    assert plan.shape is not None and not find_problems(plan)
