"""A check at the start: the learner's forward pass against the model's plain one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from config.schema.errors import ConfigError
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.weight_bounds import Bounds
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.forward import ResponseScorer
from torchgrpo.training.scoring import plain_scores
from torchgrpo.training.training_mode import evaluation_mode


def check_forward(
    scorer: ResponseScorer, prompts: Sequence[int], bounds: Bounds, autocast: torch.dtype | None = None
) -> None:
    """Refuse a model whose packed or padded rows differ from each row by itself.

    prompts: lengths, one beyond the model's window, if it has one. autocast: of each row by itself. Raises ConfigError.
    """
    causal: Any = causal_model(scorer.model)
    tokens = _rows(prompts, causal.get_input_embeddings().weight.shape[0])
    pairs = [(row.prompt[row.prompt_mask], row.response[row.response_mask]) for row in tokens]
    sequences = [[*prompt.tolist(), *response.tolist()] for prompt, response in pairs]
    # The distribution that engines sample from has no part in it.
    plain_sampling = replace(scorer, temperature=1.0, top_p=1.0, top_k=0)
    # On a GPU attention is compiled, for the steps that follow too; on a CPU nothing is but layers, which is long.
    stance = "force_eager" if causal.device.type == "cpu" else "default"
    with torch.no_grad(), evaluation_mode(scorer.model), torch.compiler.set_stance(stance):
        log_probs = plain_sampling(tokens).log_prob.cpu()[tokens.response_mask]
    scores = plain_scores(scorer.model, sequences, within=scorer.within, autocast=autocast)
    counts = tokens.response_mask.sum(1).tolist()
    plain = torch.tensor([one for row, count in zip(scores, counts, strict=True) for one in row[-count:]])
    gaps = (log_probs - plain).abs() / (1 + plain.abs())
    if not (gaps.mean() <= bounds.mean and gaps.max() <= bounds.largest):
        rows, remedy = ("packed", "train.packing=false") if scorer.packs else ("padded", "another model")
        raise ConfigError(
            f"{type(causal).__name__}: {rows} rows have other log-probs than each row by itself "
            f"(by {float(gaps.max()):.2g} of 1 + |log-prob|): take {remedy}"
        )


def _rows(prompts: Sequence[int], vocabulary: int) -> Tokens:
    """Two responses to each prompt, ids by chance."""
    generator = torch.Generator().manual_seed(7)
    widths = torch.tensor(list(prompts)).repeat_interleave(2)
    mask = torch.arange(8) < 4 + torch.arange(len(widths))[:, None] % 5
    prompt = torch.randint(
        0, vocabulary, (len(prompts), max(prompts)), generator=generator
    ).repeat_interleave(2, 0)
    response = torch.randint(0, vocabulary, mask.shape, generator=generator)
    prompt_mask = torch.arange(prompt.shape[1]) >= prompt.shape[1] - widths[:, None]
    return Tokens(prompt * prompt_mask, prompt_mask, response * mask, mask, mask, batch_size=[len(widths)])
