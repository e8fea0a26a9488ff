"""Learner, engine and export compute the plain forward pass of each architecture, or refuse it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from config.schema.errors import ConfigError
from config.schema.models import LoraConfig, ModelConfig
from envs.group import Sampling
from tests.architectures import ARCHITECTURES, save_tiny
from tests.groups import make_completion, make_group
from tests.local_policy import LocalPolicy
from torchgrpo.batches.batch import collate
from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.plan.model_shape import plain_attention
from torchgrpo.plan.plan import WeightCheckPlan
from torchgrpo.rollout.engines.interface import Request, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import write_tensors
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.model_files import check_model_files
from torchgrpo.training.model_loading import load_model, load_tokenizer
from torchgrpo.training.model_writer import ModelWriter
from torchgrpo.training.published_weights import named_weights
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.trained_parameters import MODEL_PREFIX

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
EXACT = 1e-4
EOS, VOCABULARY = 2, 263
PROMPTS = (9, 17, 30)
"""Lengths of prompts in tokens; all exceed the attention windows of 8 of the architectures."""
AFTER_THE_HEAD = "changes its logits after the output head"
REFUSALS = {
    **dict.fromkeys(
        ("gemma2", "gemma3n_text", "vaultgemma", "recurrent_gemma", "nanochat", "xlstm", "granite", "cohere"),
        AFTER_THE_HEAD,
    ),
    **dict.fromkeys(("cohere2", "cohere2_moe", "minicpm3", "modernbert-decoder"), AFTER_THE_HEAD),
    **dict.fromkeys(("bert", "bert-both-ways", "roberta"), AFTER_THE_HEAD),
    **dict.fromkeys(("llama4_text", "electra"), "is not a language model with an output head"),
    "llama-dynamic-crossed": "change with the length beyond 32 tokens",
    "phi3-longrope-crossed": "change with the length beyond",
    "rwkv": "the engine's decoding is not this model's forward pass",
    "xlm": "the engine's decoding is not this model's forward pass",
    "xlnet": "does not generate|the engine's decoding is not|rows and single rows have different log-probs",
    "xlnet-both-ways": "rows and single rows have different log-probs",
    "reformer-lsh": "rows and single rows have different log-probs",
}
"""Architectures that cannot be trained, with patterns of their error messages."""


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, sequence: Sequence[int], last: int) -> Tensor:
    """Returns log-probs of the last `last` tokens of one sequence from the model's logits."""
    ids = torch.tensor([list(sequence)])
    scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[-last:, 0]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def start_model_and_engine(config: ModelConfig) -> tuple[PreTrainedModel, TransformersEngine]:
    """Starts model and engine as a run does, with all checks of the start."""
    check_model_files(config, load_tokenizer(config), longest=PROMPTS[-1] + 24)
    model = load_model(config, CPU)
    check_forward(ResponseScorer(model), PROMPTS, BOUNDS["float32"])
    engine = TransformersEngine(load_model(config, CPU), (EOS,))
    plan = WeightCheckPlan("float32", BOUNDS["float32"], BOUNDS["float32"], 1, 24, PROMPTS)
    WeightCheck(plan, engine, LocalPolicy(model, named_weights)).compare(0)
    return model, engine


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_learner_engine_and_export_compute_the_plain_forward_pass(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    config = ModelConfig(str(tmp_path / "model"), attn_implementation=ARCHITECTURES[name].attention)
    if name in REFUSALS:
        with pytest.raises((ConfigError, WeightMismatch), match=REFUSALS[name]):
            start_model_and_engine(config)
        return
    model, engine = start_model_and_engine(config)
    plain_model = AutoModelForCausalLM.from_pretrained(
        config.name, attn_implementation=config.attn_implementation
    ).eval()
    check_learner(model, plain_model)
    check_engine(engine, plain_model)
    check_export(config, plain_model, tmp_path)


def check_learner(model: PreTrainedModel, plain_model: PreTrainedModel) -> None:
    groups = []
    for index, length in enumerate(PROMPTS):
        completions = [make_completion(count) for count in (6 + index, 24 - index)]
        for one in completions:
            one.token_ids = random_tokens(len(one.token_ids), 100 * index + len(one.token_ids))
        groups.append(make_group(index, completions, prompt=random_tokens(length, index)))
    tokens = collate(groups).tokens
    sequences = [(one.token_ids, [*group.prompt, *one.token_ids]) for group in groups for one in group.completions]
    for packs in (True, False):
        scorer = ResponseScorer(model, packs)
        assert scorer.packs == (packs and plain_attention(model.config.to_dict()))
        with torch.no_grad():
            log_probs = scorer(tokens).log_prob
        for row, (token_ids, sequence) in zip(log_probs, sequences, strict=True):
            assert torch.allclose(
                row[: len(token_ids)], plain_log_probs(plain_model, sequence, len(token_ids)), rtol=0, atol=EXACT
            )


def check_engine(engine: TransformersEngine, plain_model: PreTrainedModel) -> None:
    requests = [
        Request(index, tuple(random_tokens(length, index)), 3, Sampling(max_tokens=24), seed=index)
        for index, length in enumerate((*PROMPTS, PROMPTS[0]))
    ]
    for request, response in zip(requests, generate(engine, requests), strict=True):
        for one in response.completions:
            expected = plain_log_probs(plain_model, [*request.prompt, *one.token_ids], len(one.token_ids))
            assert torch.allclose(torch.tensor(one.log_probs), expected, rtol=0, atol=EXACT)


def check_export(config: ModelConfig, plain_model: PreTrainedModel, tmp_path: Path) -> None:
    """Checks the export of a checkpoint whose weights differ from the model's files."""
    with torch.no_grad():
        for parameter in plain_model.parameters():
            parameter.mul_(1.1)
    tensors = {f"{MODEL_PREFIX}{name}": parameter.detach() for name, parameter in plain_model.named_parameters()}
    write_tensors(tmp_path / LEARNER, tensors)
    (tmp_path / "exported").mkdir()
    ModelWriter(config, LoraConfig()).write(tmp_path / LEARNER, tmp_path / "exported")
    loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True, attn_implementation=config.attn_implementation
    )
    assert not any(loaded[1].values())
    sequence = random_tokens(40, 5)
    assert torch.allclose(
        plain_log_probs(loaded[0].eval(), sequence, 39), plain_log_probs(plain_model, sequence, 39), rtol=0, atol=EXACT
    )
