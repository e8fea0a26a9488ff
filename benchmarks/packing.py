"""Compares time, memory and results of log-probs on packed, padded and prompt-cached batches.

    python benchmarks/packing.py [MODEL_FOLDER] [--prompts 4] [--repeats 8] [--prompt 128] [--limit 128]
    [--equal]

Runs the forward and backward pass of the log-probs of answers, with log-normal lengths (sigma 0.8) or equal
lengths, and with a random Llama unless a folder is given. The three scorers are `cached` (the prompt is shared
through a key/value cache), `whole` (padded rows) and `packed`; they take turns in each round. Prints for each
the median seconds and their ratio to packing; the number of computed positions and its ratio, which equals the
ratio of the seconds if every position costs the same; and the maximum difference of the log-probs and of
the gradient, relative to the largest gradient.
"""

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.common import answer_length, describe_machine, make_parser, save_llama, time_call
from torchgrpo.batches.batch import Tokens
from torchgrpo.training.packed_sequence import packed_positions
from torchgrpo.training.response_scorer import ResponseScorer, ScoringInputs, padded_rows


def sample_tokens(options: argparse.Namespace, vocabulary: int, seed: int = 1) -> Tokens:
    """Returns groups of random tokens.

    Prompt lengths are uniform from half of `--prompt` to all of it; answers have about a quarter of `--limit`.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = options.prompts * options.repeats
    prompts = torch.randint(options.prompt // 2, options.prompt + 1, (options.prompts, 1), generator=generator)
    deviations = torch.randn(rows, generator=generator).tolist()
    lengths = torch.tensor([[answer_length(deviation, options.limit)] for deviation in deviations])
    if options.equal:
        prompts, lengths = torch.full_like(prompts, options.prompt), torch.full_like(lengths, options.limit)
    mask = torch.arange(options.limit) < lengths
    prompt_mask = (torch.arange(options.prompt) >= options.prompt - prompts).repeat_interleave(options.repeats, 0)
    ids = torch.randint(0, vocabulary, (options.prompts, options.prompt), generator=generator)
    return Tokens(
        prompt=ids.repeat_interleave(options.repeats, 0) * prompt_mask,
        prompt_mask=prompt_mask,
        response=torch.randint(0, vocabulary, (rows, options.limit), generator=generator) * mask,
        response_mask=mask,
        loss_mask=mask,
        batch_size=[rows],
    )


def trim(tokens: Tokens) -> Tokens:
    """Removes the columns that are padding in all rows."""
    prompt_width, width = int(tokens.prompt_mask.sum(-1).max()), int(tokens.response_mask.sum(-1).max())
    return Tokens(
        tokens.prompt[:, -prompt_width:],
        tokens.prompt_mask[:, -prompt_width:],
        tokens.response[:, :width],
        tokens.response_mask[:, :width],
        tokens.loss_mask[:, :width],
        batch_size=tokens.batch_size,
    )


class PrefixCacheScorer(ResponseScorer):
    """Computes a prompt's keys and values once, and repeats them for the prompt's padded answers."""

    repeats: int
    tokens: Tokens

    def prepare(self, tokens: Tokens, temperature: Tensor | None = None) -> ScoringInputs:
        self.tokens = trim(tokens)
        return super().prepare(tokens, temperature)

    def _padded_hidden_states(self, causal: PreTrainedModel, inputs: ScoringInputs) -> Tensor:
        tokens = self.tokens
        prompt, prompt_mask = tokens.prompt[:: self.repeats], tokens.prompt_mask[:: self.repeats]
        cache = DynamicCache()
        positions = (prompt_mask.cumsum(1) - 1).clamp_min(0)
        first = causal.base_model(prompt, prompt_mask.long(), positions, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(self.repeats)
        prompt_lengths = prompt_mask.sum(1).repeat_interleave(self.repeats)[:, None]
        rest = causal.base_model(
            tokens.response[:, :-1],
            torch.cat([tokens.prompt_mask, tokens.response_mask[:, :-1]], 1).long(),
            prompt_lengths + torch.arange(tokens.response.shape[1] - 1),
            past_key_values=cache,
            use_cache=True,
        )
        last = first.last_hidden_state[:, -1:].repeat_interleave(self.repeats, 0)
        return torch.cat([last, rest.last_hidden_state], 1)[tokens.loss_mask]


def make_scorers(options: argparse.Namespace, model: PreTrainedModel) -> dict[str, ResponseScorer]:
    """Returns the scorers by name."""
    cached = PrefixCacheScorer(model, packs=False)
    cached.repeats = options.repeats
    return {"cached": cached, "whole": ResponseScorer(model, packs=False), "packed": ResponseScorer(model)}


def forward_backward(model: PreTrainedModel, score: ResponseScorer, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Returns the log-probs and the gradient of their sum."""
    log_prob = score(tokens).log_prob
    (log_prob.sum() / len(tokens)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return log_prob.detach(), gradient


def count_positions(name: str, tokens: Tokens, repeats: int) -> int:
    """Returns the number of positions that the scorer `name` computes."""
    if name == "packed":
        return packed_positions(tokens)
    if name == "cached":
        trimmed = trim(tokens)
        return trimmed.prompt_mask.numel() // repeats + trimmed.response_mask[:, 1:].numel()
    return padded_rows(tokens)[0].numel()


def main() -> None:
    parser = make_parser(__doc__, prompts=4, repeats=8, prompt=128, limit=128, rounds=3)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--equal", action="store_true", help="all prompts and answers at their limits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = options.model or save_llama(Path(folder), 8192, 256, 688, 6, 8, 4)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()
    tokens, scorers = sample_tokens(options, model.config.vocab_size), make_scorers(options, model)
    rounds = [
        {name: time_call(partial(forward_backward, model, scorer, tokens)) for name, scorer in scorers.items()}
        for _ in range(options.rounds)
    ]
    packed_seconds = statistics.median(each["packed"][0] for each in rounds)
    packed_count = count_positions("packed", tokens, options.repeats)
    expected_log_prob, expected_gradient = rounds[0]["whole"][1]
    print(
        f"{describe_machine()}\n{'way':10}{'seconds':>9}{'ratio':>8}{'positions':>11}{'ratio':>8}"
        f"{'log-prob off':>14}{'gradient off':>14}"
    )
    for name, (_, (log_prob, gradient)) in rounds[0].items():
        seconds = statistics.median(each[name][0] for each in rounds)
        computed = count_positions(name, tokens, options.repeats)
        log_prob_error = (log_prob - expected_log_prob).abs().max()
        gradient_error = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
        print(
            f"{name:10}{seconds:9.3f}{seconds / packed_seconds:8.2f}{computed:11}{computed / packed_count:8.2f}"
            f"{log_prob_error:14.1e}{gradient_error:14.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
