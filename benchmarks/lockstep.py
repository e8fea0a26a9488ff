"""Wall time of a lockstep iteration beside the same work in a bare loop of plain torch, in one process, in turn.

    python benchmarks/lockstep.py [--iterations 30] [key=value ...]

Prints seconds of an iteration of grpo.py's loop (collect, advantage, learn, push, metrics), of the bare loop, which
shares prompts likewise and has no framework, and of the weight check, which the bare loop has not; the ratio pair by
pair, and the peak memory of either, each in a process of its own. Both train from the same weights on the same prompts.
"""

import copy
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import grpo
from benchmarks.common import arguments, configured, machine, spread
from config.schema.config import Config
from envs.task import Example, make_task
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.build import build
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.model_loading import load_model, load_tokenizer
from torchgrpo.training.optimizer import make_optimizer

WARM_UP = 3


@dataclass
class BareLoop:
    """GRPO with nothing around it: plain torch, the yardstick."""

    model: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    repeats: int
    max_tokens: int
    kl_coef: float
    eos: int

    def iteration(self, examples: Sequence[Example]) -> None:
        """Samples groups, judges them, and makes one clipped update with a KL to `reference`."""
        prompts = [
            self.tokenizer.apply_chat_template(
                list(example.messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for example in examples
        ]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        responses, mask, sampled = self.generate(ids, lengths)
        texts = self.tokenizer.batch_decode(
            [row[keep].tolist() for row, keep in zip(responses, mask, strict=True)], skip_special_tokens=True
        )
        rewards = torch.tensor(
            [float(text.strip() == examples[row // self.repeats].answer) for row, text in enumerate(texts)]
        ).view(-1, self.repeats)
        deviation = rewards.std(1, keepdim=True)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)).view(-1, 1)
        self.update(ids, lengths, responses, mask, sampled, advantage)

    @torch.no_grad()
    def generate(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Batched sampling, the prompt prefilled once for its group; finished rows ride along to the end."""
        cache = DynamicCache()
        width = ids.shape[1]
        hidden = self.model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state
        hidden = hidden[torch.arange(len(ids)), lengths - 1].repeat_interleave(self.repeats, 0)
        cache.batch_repeat_interleave(self.repeats)
        lengths = lengths.repeat_interleave(self.repeats)
        visible = torch.arange(width) < lengths[:, None]
        running = torch.ones(len(lengths), dtype=torch.bool)
        tokens, masks, log_probs = [], [], []
        for step in range(self.max_tokens):
            logits = self.model.lm_head(hidden).log_softmax(-1)
            token = torch.multinomial(logits.exp(), 1)
            tokens.append(token)
            masks.append(running[:, None].clone())
            log_probs.append(logits.gather(1, token))
            running &= token[:, 0] != self.eos
            if not running.any() or step == self.max_tokens - 1:
                break
            visible = torch.cat([visible, torch.ones(len(lengths), 1, dtype=torch.bool)], 1)
            hidden = self.model.model(
                token,
                attention_mask=visible[:, None, None],
                position_ids=(lengths + step)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, 0]
        return torch.cat(tokens, 1), torch.cat(masks, 1), torch.cat(log_probs, 1)

    def log_probs(
        self, model: PreTrainedModel, ids: Tensor, lengths: Tensor, responses: Tensor, mask: Tensor
    ) -> Tensor:
        cache = DynamicCache()
        hidden = model.model(ids, past_key_values=cache, use_cache=True).last_hidden_state
        last = hidden[torch.arange(len(ids)), lengths - 1].repeat_interleave(self.repeats, 0)[:, None]
        cache.batch_repeat_interleave(self.repeats)
        lengths = lengths.repeat_interleave(self.repeats)
        queries, width = responses.shape[1] - 1, ids.shape[1]
        columns = torch.arange(width + queries)
        own = torch.arange(width, width + queries)[:, None]
        seen = torch.cat([torch.arange(width) < lengths[:, None], mask[:, :-1]], 1)
        attend = (seen[:, None, None] & (columns <= own)) | (columns == own)
        hidden = model.model(
            responses[:, :-1],
            attention_mask=attend,
            position_ids=lengths[:, None] + torch.arange(queries),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits = model.lm_head(torch.cat([last, hidden], 1)[mask])
        return logits.log_softmax(-1).gather(1, responses[mask][:, None])[:, 0]

    def update(
        self,
        ids: Tensor,
        lengths: Tensor,
        responses: Tensor,
        mask: Tensor,
        sampled: Tensor,
        advantage: Tensor,
    ) -> None:
        with torch.no_grad():
            reference = self.log_probs(self.reference, ids, lengths, responses, mask)
        log_prob = self.log_probs(self.model, ids, lengths, responses, mask)
        ratio = (log_prob - sampled[mask]).exp()
        advantage = advantage.expand_as(mask)[mask]
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = reference - log_prob
        loss = -(objective - self.kl_coef * (difference.exp() - difference - 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Timed(Lockstep):
    """grpo.py's loop for some iterations, each timed; an iteration of `bare_loop` comes before each."""

    iterations_left = 0
    bare_loop: Callable[[list[Example]], None] = staticmethod(lambda examples: None)

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.check: list[float] = []

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, self.iterations_left + 1):
            begun = self.collector.prompts.begin(self.config.prompts_per_iteration)
            began = time.perf_counter()
            self.bare_loop([example for _, example in begun])
            middle = time.perf_counter()
            yield iteration
            self.ours.append(time.perf_counter() - middle)
            self.bare.append(middle - began)

    def push_weights(self) -> None:
        super().push_weights()
        if self.collector.weights.version > 0:
            self.check.append(self.monitor.extra.get("weight_check/seconds", 0.0))

    def done(self, iteration: int, rollout: Rollout) -> None:
        """The ledger, but neither evaluation nor checkpoint, which a bare loop has not."""
        self.monitor.consumed(iteration, rollout.groups, [])


def make_bare(config: Config, model: PreTrainedModel) -> BareLoop:
    own, reference = (copy.deepcopy(model) for _ in range(2))
    tokenizer = load_tokenizer(config.model)
    return BareLoop(
        own.train(),
        reference.eval(),
        tokenizer,
        make_optimizer(own, config.optimizer),
        config.env.repeats,
        config.inference_model.max_tokens,
        config.policy.kl_coef,
        tokenizer.eos_token_id,
    )


def peak_alone(which: str, arguments: Sequence[str]) -> float:
    """GiB of resident memory that a process of its own reaches."""
    command = [sys.executable, __file__, "--only", which, "--iterations", "5", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_alone(which: str, config: Config, iterations: int, folder: Path) -> None:
    """Prints the peak after some iterations of one of the two."""
    if which == "ours":
        working = build(config, folder, Timed)
        working.iterations_left = iterations
        grpo.train(working)
        working.close("finished")
    else:
        torch.set_num_threads(config.train_model.num_threads or torch.get_num_threads())
        bare = make_bare(config, load_model(config.model, torch.device("cpu")))
        examples = itertools.cycle(make_task(config.env).examples("train"))
        for _ in range(iterations):
            bare.iteration(list(itertools.islice(examples, config.prompts_per_iteration)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def compare(config: Config, iterations: int, folder: Path) -> list[list[float]]:
    """Seconds of each iteration: ours, the bare loop's, the weight check's."""
    working = build(config, folder, Timed)
    bare = make_bare(config, causal_model(working.learner.worker.model))
    working.iterations_left = iterations + WARM_UP
    working.bare_loop = bare.iteration
    grpo.train(working)
    working.close("finished")
    return [taken[WARM_UP:] for taken in (working.ours, working.bare, working.check)]


def main() -> None:
    parser = arguments(__doc__, iterations=30)
    parser.add_argument("--config-name", default="grpo_quickstart")
    parser.add_argument("--only", choices=("ours", "bare"), help="print the peak memory of one, alone")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    config = configured(
        asked.config_name, "optimizer.lr=0", "train.total_dialog_turns=1000000", *asked.overrides
    )
    with tempfile.TemporaryDirectory() as folder:
        if asked.only:
            run_alone(asked.only, config, asked.iterations, Path(folder))
            return
        ours, theirs, check = compare(config, asked.iterations, Path(folder))
    pairs = list(zip(ours, theirs, check, strict=True))
    named = ["--config-name", asked.config_name, *asked.overrides]
    print(
        f"{machine()}\n{config.model.name}, {config.prompts_per_iteration} x {config.env.repeats} completions, "
        f"{torch.get_num_threads()} threads, {asked.iterations} iterations in turn"
    )
    print(f"  ours          {spread(ours, 4)} s, peak {peak_alone('ours', named):.2f} GiB")
    print(f"  bare loop     {spread(theirs, 4)} s, peak {peak_alone('bare', named):.2f} GiB")
    print(f"  weight check  {statistics.mean(check):.4f} s of ours, in the mean")
    print(f"  ratio         {spread([own / other for own, other, _ in pairs])}")
    print(f"  without check {spread([(own - part) / other for own, other, part in pairs])}")


if __name__ == "__main__":
    main()
