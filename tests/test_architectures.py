"""Architectures of transformers from their files to a push: everybody computes the plain forward pass, or refuses."""

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
from tests.policies import PolicyHere
from torchgrpo.batches.batch import collate
from torchgrpo.plan.model_shape import plain_attention
from torchgrpo.plan.plan import WeightCheckPlan
from torchgrpo.plan.weight_bounds import BOUNDS
from torchgrpo.rollout.engines.interface import Request, generate
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.weights.weight_check import WeightCheck, WeightMismatch
from torchgrpo.training.checkpoint import LEARNER
from torchgrpo.training.checkpoint_tensors import write_tensors
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.forward_check import check_forward
from torchgrpo.training.model_files import check_files
from torchgrpo.training.model_loading import load_model, load_tokenizer
from torchgrpo.training.model_writer import ModelWriter
from torchgrpo.training.published_weights import named_weights
from torchgrpo.training.trained_parameters import MODEL

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
EXACT = 1e-4
EOS, VOCABULARY = 2, 263
PROMPTS = (9, 17, 30)
"""Lengths: with 24 tokens behind each all are beyond the windows of 8 that the architectures have."""
AFTER_THE_HEAD = "changes its logits after the output head"
REFUSED = {
    **dict.fromkeys(
        ("gemma2", "gemma3n_text", "vaultgemma", "recurrent_gemma", "nanochat", "xlstm", "granite", "cohere"),
        AFTER_THE_HEAD,
    ),
    **dict.fromkeys(("cohere2", "cohere2_moe", "minicpm3", "modernbert-decoder"), AFTER_THE_HEAD),
    **dict.fromkeys(("bert", "bert-both-ways", "roberta"), AFTER_THE_HEAD),
    **dict.fromkeys(("llama4_text", "electra"), "is no language model whose logits"),
    "llama-dynamic-crossed": "change with the length beyond 32 tokens",
    "phi3-longrope-crossed": "change with the length beyond",
    "rwkv": "the engine's decoding is not this model's forward pass",
    "xlm": "the engine's decoding is not this model's forward pass",
    "xlnet": "does not generate|the engine's decoding is not|rows have other log-probs",
    "xlnet-both-ways": "rows have other log-probs than each row by itself",
    "reformer-lsh": "rows have other log-probs than each row by itself",
}
"""What is said of the architectures that cannot be trained on."""


@torch.no_grad()
def plain(model: PreTrainedModel, sequence: Sequence[int], last: int) -> Tensor:
    """Log-probs of the last tokens by the model's own logits, the sequence by itself."""
    ids = torch.tensor([list(sequence)])
    scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[-last:, 0]


def row(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def started(config: ModelConfig) -> tuple[PreTrainedModel, TransformersEngine]:
    """Model and engine as a run starts them, all checks of the start behind them."""
    check_files(config, load_tokenizer(config), longest=PROMPTS[-1] + 24)
    model = load_model(config, CPU)
    check_forward(ResponseScorer(model), PROMPTS, BOUNDS["float32"])
    engine = TransformersEngine(load_model(config, CPU), (EOS,))
    plan = WeightCheckPlan("float32", BOUNDS["float32"], BOUNDS["float32"], 1, 24, PROMPTS)
    WeightCheck(plan, engine, PolicyHere(model, named_weights)).compare(0)
    return model, engine


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_learner_engine_and_export_compute_the_plain_forward_pass(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    config = ModelConfig(str(tmp_path / "model"), attn_implementation=ARCHITECTURES[name].attention)
    if name in REFUSED:
        with pytest.raises((ConfigError, WeightMismatch), match=REFUSED[name]):
            started(config)
        return
    model, engine = started(config)
    truth = AutoModelForCausalLM.from_pretrained(
        config.name, attn_implementation=config.attn_implementation
    ).eval()
    learner_computes(model, truth)
    engine_samples(engine, truth)
    exported(config, truth, tmp_path)


def learner_computes(model: PreTrainedModel, truth: PreTrainedModel) -> None:
    groups = []
    for place, length in enumerate(PROMPTS):
        completions = [make_completion(count) for count in (6 + place, 24 - place)]
        for one in completions:
            one.token_ids = row(len(one.token_ids), 100 * place + len(one.token_ids))
        groups.append(make_group(place, completions, prompt=row(length, place)))
    tokens = collate(groups).tokens
    sequences = [
        (one.token_ids, [*group.prompt, *one.token_ids]) for group in groups for one in group.completions
    ]
    for packs in (True, False):
        scorer = ResponseScorer(model, packs)
        assert scorer.packs == (packs and plain_attention(model.config.to_dict()))
        with torch.no_grad():
            found = scorer(tokens).log_prob
        for own, (drawn, sequence) in zip(found, sequences, strict=True):
            assert torch.allclose(own[: len(drawn)], plain(truth, sequence, len(drawn)), rtol=0, atol=EXACT)


def engine_samples(engine: TransformersEngine, truth: PreTrainedModel) -> None:
    requests = [
        Request(place, tuple(row(length, place)), 3, Sampling(max_tokens=24), seed=place)
        for place, length in enumerate((*PROMPTS, PROMPTS[0]))
    ]
    for request, response in zip(requests, generate(engine, requests), strict=True):
        for one in response.completions:
            expected = plain(truth, [*request.prompt, *one.token_ids], len(one.token_ids))
            assert torch.allclose(torch.tensor(one.log_probs), expected, rtol=0, atol=EXACT)


def exported(config: ModelConfig, truth: PreTrainedModel, tmp_path: Path) -> None:
    """A checkpoint of other weights than the files have, as a folder."""
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.mul_(1.1)
    tensors = {f"{MODEL}{name}": parameter.detach() for name, parameter in truth.named_parameters()}
    write_tensors(tmp_path / LEARNER, tensors)
    (tmp_path / "exported").mkdir()
    ModelWriter(config, LoraConfig()).write(tmp_path / LEARNER, tmp_path / "exported")
    loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True, attn_implementation=config.attn_implementation
    )
    assert not any(loaded[1].values())
    sequence = row(40, 5)
    assert torch.allclose(
        plain(loaded[0].eval(), sequence, 39), plain(truth, sequence, 39), rtol=0, atol=EXACT
    )
