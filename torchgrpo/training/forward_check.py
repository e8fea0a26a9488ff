"""Checks that log-probs of packed or padded rows equal those of each row alone.

Each process with a model runs the check once, after loading.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from config.schema.errors import ConfigError
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.log_prob_bounds import Bounds
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.plain_log_probs import plain_log_probs
from torchgrpo.training.response_scorer import ResponseScorer
from torchgrpo.training.training_mode import evaluation_mode


def check_forward(
    scorer: ResponseScorer, prompts: Sequence[int], bounds: Bounds, autocast: torch.dtype | None = None
) -> None:
    """Checks that packed or padded rows have the log-probs of separate rows.

    prompts: prompt lengths to try, one of them beyond the attention window of the model if there is a window.
    autocast: autocast dtype for separate rows.

    Raises:
        ConfigError: the log-probs differ by more than `bounds`.
    """
    causal: Any = causal_model(scorer.model)
    tokens = _rows(prompts, causal.get_input_embeddings().weight.shape[0])
    pairs = [(row.prompt[row.prompt_mask], row.response[row.response_mask]) for row in tokens]
    sequences = [[*prompt.tolist(), *response.tolist()] for prompt, response in pairs]
    # Compare without the sampling distribution of the engines.
    plain_sampling = replace(scorer, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    # On a GPU the attention compiled here serves the training steps too. On a CPU only layers would be
    # compiled, slowly.
    stance = "force_eager" if causal.device.type == "cpu" else "default"
    with torch.no_grad(), evaluation_mode(scorer.model), torch.compiler.set_stance(stance):
        log_probs = plain_sampling(tokens).log_prob.cpu()[tokens.response_mask]
    scores = plain_log_probs(scorer.model, sequences, unsharded_context=scorer.unsharded_context, autocast=autocast)
    counts = tokens.response_mask.sum(1).tolist()
    plain = torch.tensor([one for row, count in zip(scores, counts, strict=True) for one in row[-count:]])
    gaps = (log_probs - plain).abs() / (1 + plain.abs())
    if not (gaps.mean() <= bounds.mean and gaps.max() <= bounds.largest):
        rows, remedy = ("packed", "set train.packing=false") if scorer.packs else ("padded", "choose another model")
        raise ConfigError(
            f"{type(causal).__name__}: {rows} rows and single rows have different log-probs (by "
            f"{float(gaps.max()):.2g} of 1 + |log-prob|): {remedy}"
        )


def _rows(prompts: Sequence[int], vocabulary: int) -> Tokens:
    """Builds two responses per prompt length, with random ids."""
    generator = torch.Generator().manual_seed(7)
    widths = torch.tensor(list(prompts)).repeat_interleave(2)
    mask = torch.arange(8) < 4 + torch.arange(len(widths))[:, None] % 5
    prompt = torch.randint(0, vocabulary, (len(prompts), max(prompts)), generator=generator).repeat_interleave(2, 0)
    response = torch.randint(0, vocabulary, mask.shape, generator=generator)
    prompt_mask = torch.arange(prompt.shape[1]) >= prompt.shape[1] - widths[:, None]
    return Tokens(prompt * prompt_mask, prompt_mask, response * mask, mask, mask, batch_size=[len(widths)])
