"""Tests plans of models without plain causal attention.

Subjects: whole rows, the decoder, attention windows, lengths beyond the rope limit.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from config.schema.errors import ConfigError
from tests.architectures import ARCHITECTURES
from tests.plan.test_plan import QWEN, gpu_plan, text_of
from torchgrpo.plan.model_shape import make_shape
from torchgrpo.plan.problems import check_plan


def write_model_config(folder: Path, **fields: object) -> str:
    (folder / "config.json").write_text(json.dumps(QWEN | fields))
    return f"model.name={folder}"


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "a_model_of_tomorrow"},
        {"model_type": "mistral", "sliding_window": 8, "use_sliding_window": False},
        {"model_type": "phimoe", "sliding_window": 8, "layer_types": ["full_attention"] * 36},
        {"model_type": "gemma3", "text_config": QWEN | {"model_type": "gemma3_text"}},
    ],
)
def test_the_plan_notes_whole_rows_and_decoding_by_transformers(fields: dict[str, object], tmp_path: Path) -> None:
    name, backend = write_model_config(tmp_path, **fields), "inference_model.backend=transformers"
    plan = gpu_plan(name, backend)
    assert not plan.learner.packs
    assert "microbatches are whole rows" in text_of(plan) and "transformers' own generate" in text_of(plan)
    text = text_of(gpu_plan(name, backend, "train.packing=false"))
    assert "microbatches are whole rows" not in text and "transformers' own generate" in text
    assert "transformers' own generate" not in text_of(gpu_plan(name))


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 4096, "use_sliding_window": False}])
def test_the_plan_of_a_plain_model_has_no_note_about_whole_rows(fields: dict[str, object], tmp_path: Path) -> None:
    plan = gpu_plan(write_model_config(tmp_path, **fields))
    assert plan.learner.packs and "whole rows" not in text_of(plan)


@pytest.mark.parametrize(
    "name", sorted(ARCHITECTURES.keys() - {"nemotron_h"})
)  # nemotron_h has one layer entry per kind of layer
def test_the_sizes_of_every_architecture_are_known(name: str) -> None:
    entry = ARCHITECTURES[name]
    raw = AutoConfig.for_model(entry.kind, **entry.fields).to_dict()
    shape = make_shape(raw, name)
    assert (shape.vocab_size, shape.num_heads > 0, shape.num_layers > 0) == (263, True, True)


def test_a_row_of_the_weight_check_reaches_beyond_the_window(tmp_path: Path) -> None:
    name = write_model_config(tmp_path, model_type="mistral", sliding_window=1024)
    assert gpu_plan(name, "inference_model.max_tokens=2048").weight_check.prompts == (8, 12, 1028)
    assert gpu_plan(name, "env.max_prompt_tokens=500", "inference_model.max_tokens=500").weight_check.prompts == (8, 12)


AT_1024 = {"original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | AT_1024},
        {"rope_scaling": {"type": "longrope"}} | AT_1024,
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"} | AT_1024}},
    ],
)
def test_lengths_at_which_rotary_embeddings_change_are_refused(rope: dict[str, object], tmp_path: Path) -> None:
    name = write_model_config(tmp_path, model_type="phi3", **rope)
    lengths = ("env.max_prompt_tokens=512", "inference_model.max_tokens")
    with pytest.raises(ConfigError, match=r"the rotary embeddings .* beyond 1024 tokens .* may reach 1025 tokens"):
        check_plan(gpu_plan(name, lengths[0], f"{lengths[1]}=513"))
    assert "rotary" not in text_of(gpu_plan(name, lengths[0], f"{lengths[1]}=512"))
