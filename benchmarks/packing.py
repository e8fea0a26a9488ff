"""Packed groups beside two padded ways: a prompt shared through a key/value cache, and whole rows.

    python benchmarks/packing.py [MODEL_FOLDER] [--prompts 4] [--repeats 8] [--prompt 128] [--limit 128] [--equal]

Forward and backward pass of the log-probs of answers whose lengths are log-normal (sigma 0.8), as answers are, or all
equal; without a folder by a random Llama. Prints medians of rounds in which the ways take turns and their ratios to
packing, the positions that each computes and their ratio, which the seconds would have if a position cost the same
everywhere and nothing else did, the largest difference of its log-probs and of its gradient (relative to the largest of
the gradient), and the peak memory of each in a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.common import answer_length, arguments, machine, save_llama, timed
from torchgrpo.batches.batch import Tokens
from torchgrpo.training.forward import ResponseScorer, whole_rows
from torchgrpo.training.packed_sequence import packed_positions


def drawn(asked: argparse.Namespace, vocabulary: int, seed: int = 1) -> Tokens:
    """Prompts of half to the whole of the longest length, and answers around a quarter of the limit."""
    generator = torch.Generator().manual_seed(seed)
    rows = asked.prompts * asked.repeats
    prompts = torch.randint(asked.prompt // 2, asked.prompt + 1, (asked.prompts, 1), generator=generator)
    deviations = torch.randn(rows, generator=generator).tolist()
    lengths = torch.tensor([[answer_length(deviation, asked.limit)] for deviation in deviations])
    if asked.equal:
        prompts, lengths = torch.full_like(prompts, asked.prompt), torch.full_like(lengths, asked.limit)
    mask = torch.arange(asked.limit) < lengths
    prompt_mask = (torch.arange(asked.prompt) >= asked.prompt - prompts).repeat_interleave(asked.repeats, 0)
    ids = torch.randint(0, vocabulary, (asked.prompts, asked.prompt), generator=generator)
    return Tokens(
        prompt=ids.repeat_interleave(asked.repeats, 0) * prompt_mask,
        prompt_mask=prompt_mask,
        response=torch.randint(0, vocabulary, (rows, asked.limit), generator=generator) * mask,
        response_mask=mask,
        loss_mask=mask,
        batch_size=[rows],
    )


def trim(tokens: Tokens) -> Tokens:
    """Without the columns that are padding in every row."""
    prompt_width, width = int(tokens.prompt_mask.sum(-1).max()), int(tokens.response_mask.sum(-1).max())
    return Tokens(
        tokens.prompt[:, -prompt_width:],
        tokens.prompt_mask[:, -prompt_width:],
        tokens.response[:, :width],
        tokens.response_mask[:, :width],
        tokens.loss_mask[:, :width],
        batch_size=tokens.batch_size,
    )


class Cached(ResponseScorer):
    """A prompt's keys and values go once through the model, and are repeated for its padded answers."""

    repeats: int

    def _whole(self, causal: PreTrainedModel, tokens: Tokens) -> Tensor:
        tokens = trim(tokens)
        prompt, seen = tokens.prompt[:: self.repeats], tokens.prompt_mask[:: self.repeats]
        cache = DynamicCache()
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        first = causal.base_model(prompt, seen.long(), positions, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(self.repeats)
        own = seen.sum(1).repeat_interleave(self.repeats)[:, None]
        rest = causal.base_model(
            tokens.response[:, :-1],
            torch.cat([tokens.prompt_mask, tokens.response_mask[:, :-1]], 1).long(),
            own + torch.arange(tokens.response.shape[1] - 1),
            past_key_values=cache,
            use_cache=True,
        )
        last = first.last_hidden_state[:, -1:].repeat_interleave(self.repeats, 0)
        return torch.cat([last, rest.last_hidden_state], 1)[tokens.loss_mask]


def ways(asked: argparse.Namespace, model: PreTrainedModel) -> dict[str, ResponseScorer]:
    cached = Cached(model, packs=False)
    cached.repeats = asked.repeats
    found = {"cached": cached, "whole": ResponseScorer(model, packs=False), "packed": ResponseScorer(model)}
    return {name: way for name, way in found.items() if asked.only in (None, name)}


def passes(model: PreTrainedModel, score: ResponseScorer, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum."""
    log_prob = score(tokens).log_prob
    (log_prob.sum() / len(tokens)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return log_prob.detach(), gradient


def positions(name: str, tokens: Tokens, repeats: int) -> int:
    if name == "packed":
        return packed_positions(tokens)
    if name == "cached":
        kept = trim(tokens)
        return kept.prompt_mask.numel() // repeats + kept.response_mask[:, 1:].numel()
    return whole_rows(tokens)[0].numel()


def peak_kib() -> int:
    """Of this program; what `resource` says includes the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def peak_alone(name: str) -> float:
    """GiB of resident memory beyond the loaded model, of one way in a process of its own."""
    command = [sys.executable, *sys.argv, "--only", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = arguments(__doc__, prompts=4, repeats=8, prompt=128, limit=128, rounds=3)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--equal", action="store_true", help="all prompts and answers at their limits")
    parser.add_argument("--only", help="print the peak memory of one way")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = asked.model or save_llama(Path(folder), 8192, 256, 688, 6, 8, 4)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()
    tokens, scorers = drawn(asked, model.config.vocab_size), ways(asked, model)
    if asked.only:
        before = peak_kib()
        passes(model, scorers[asked.only], tokens)
        print((peak_kib() - before) / 2**20)
        return
    rounds = [
        {name: timed(partial(passes, model, way, tokens)) for name, way in scorers.items()}
        for _ in range(asked.rounds)
    ]
    packed = statistics.median(each["packed"][0] for each in rounds)
    fewest = positions("packed", tokens, asked.repeats)
    expected_log_prob, expected_gradient = rounds[0]["whole"][1]
    print(
        f"{machine()}\n{'way':10}{'seconds':>9}{'ratio':>8}{'positions':>11}{'ratio':>8}"
        f"{'log-prob off':>14}{'gradient off':>14}{'peak GiB':>10}"
    )
    for name, (_, (log_prob, gradient)) in rounds[0].items():
        seconds = statistics.median(each[name][0] for each in rounds)
        computed = positions(name, tokens, asked.repeats)
        off = (log_prob - expected_log_prob).abs().max()
        gradient_off = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
        print(
            f"{name:10}{seconds:9.3f}{seconds / packed:8.2f}{computed:11}{computed / fewest:8.2f}"
            f"{off:14.1e}{gradient_off:14.1e}{peak_alone(name):10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
