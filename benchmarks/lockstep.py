"""Compares time and memory of lockstep iterations with a bare GRPO loop in plain torch.

    python benchmarks/lockstep.py [--iterations 30] [key=value ...]

Both loops run in turn in one process, and train from the same weights on the same prompts. Prints the seconds
of an iteration of grpo.py's loop (collect, advantage, learn, push, metrics), of the bare loop, which also
shares prompts but has no framework, and of the weight check, which the bare loop lacks. Also prints the ratio
for each pair of iterations, and the peak memory of each loop in a separate process.
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
from benchmarks.common import compose_config, describe_machine, format_spread, make_parser
from config.schema.config import Config
from envs.task import Example, make_task
from torchgrpo.batches.rollout import Rollout
from torchgrpo.run.build_run import build_run
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.adapters import causal_model
from torchgrpo.training.model_loading import load_model, load_tokenizer
from torchgrpo.training.optimizer import make_optimizer

WARM_UP = 3


@dataclass
class BareLoop:
    """GRPO in plain torch without a framework, as the baseline."""

    model: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    repeats: int
    max_tokens: int
    kl_coef: float
    eos: int

    def iteration(self, examples: Sequence[Example]) -> None:
        """Samples and scores groups, and makes one clipped update with a KL to `reference`."""
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
        responses, mask, sample_log_prob = self.generate(ids, lengths)
        texts = self.tokenizer.batch_decode(
            [row[keep].tolist() for row, keep in zip(responses, mask, strict=True)], skip_special_tokens=True
        )
        rewards = torch.tensor(
            [float(text.strip() == examples[row // self.repeats].answer) for row, text in enumerate(texts)]
        ).view(-1, self.repeats)
        deviation = rewards.std(1, keepdim=True)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-4)).view(-1, 1)
        self.update(ids, lengths, responses, mask, sample_log_prob, advantage)

    @torch.no_grad()
    def generate(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Samples a batch of completions; returns tokens, mask and log-probs.

        Each prompt is prefilled once for its group. Finished rows stay in the batch to the end.
        """
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
        visible = torch.cat([torch.arange(width) < lengths[:, None], mask[:, :-1]], 1)
        attend = (visible[:, None, None] & (columns <= own)) | (columns == own)
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
        self, ids: Tensor, lengths: Tensor, responses: Tensor, mask: Tensor, sample_log_prob: Tensor, advantage: Tensor
    ) -> None:
        with torch.no_grad():
            reference = self.log_probs(self.reference, ids, lengths, responses, mask)
        log_prob = self.log_probs(self.model, ids, lengths, responses, mask)
        ratio = (log_prob - sample_log_prob[mask]).exp()
        advantage = advantage.expand_as(mask)[mask]
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = reference - log_prob
        loss = -(objective - self.kl_coef * (difference.exp() - difference - 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class TimedLockstepRun(LockstepRun):
    """Times iterations of grpo.py's loop, each after an iteration of `bare_loop`."""

    iterations_left = 0
    bare_loop: Callable[[list[Example]], None] = staticmethod(lambda examples: None)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.check_seconds: list[float] = []

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, self.iterations_left + 1):
            prompts = self.rollout_components.prompts.next_prompts(self.config.prompts_per_iteration)
            start = time.perf_counter()
            self.bare_loop([example for _, example in prompts])
            middle = time.perf_counter()
            yield iteration
            self.own_seconds.append(time.perf_counter() - middle)
            self.bare_seconds.append(middle - start)

    def push_weights(self) -> None:
        super().push_weights()
        if self.rollout_components.weight_pusher.version > 0:
            self.check_seconds.append(self.monitor.extra_metrics.get("weight_check/seconds", 0.0))

    def end_iteration(self, iteration: int, rollout: Rollout) -> None:
        """Writes only the ledger, since the bare loop has no evaluations or checkpoints."""
        self.monitor.finish_iteration(iteration, rollout.groups, [])


def make_bare_loop(config: Config, model: PreTrainedModel) -> BareLoop:
    policy, reference = (copy.deepcopy(model) for _ in range(2))
    tokenizer = load_tokenizer(config.model)
    return BareLoop(
        policy.train(),
        reference.eval(),
        tokenizer,
        make_optimizer(policy, config.optimizer),
        config.env.repeats,
        config.inference_model.max_tokens,
        config.policy.kl_coef,
        tokenizer.eos_token_id,
    )


def measure_peak_gib(variant: str, arguments: Sequence[str]) -> float:
    """Returns the peak GiB of resident memory of one loop in a separate process."""
    command = [sys.executable, __file__, "--only", variant, "--iterations", "5", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak_memory(variant: str, config: Config, iterations: int, folder: Path) -> None:
    """Runs some iterations of one loop and prints the peak memory."""
    if variant == "ours":
        run = build_run(config, folder, TimedLockstepRun)
        run.iterations_left = iterations
        grpo.train(run)
        run.close("finished")
    else:
        torch.set_num_threads(config.train_model.num_threads or torch.get_num_threads())
        bare = make_bare_loop(config, load_model(config.model, torch.device("cpu")))
        examples = itertools.cycle(make_task(config.env).examples("train"))
        for _ in range(iterations):
            bare.iteration(list(itertools.islice(examples, config.prompts_per_iteration)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def compare(config: Config, iterations: int, folder: Path) -> list[list[float]]:
    """Returns the seconds of each iteration: our loop, the bare loop, the weight check."""
    run = build_run(config, folder, TimedLockstepRun)
    bare = make_bare_loop(config, causal_model(run.learner.worker.model))
    run.iterations_left = iterations + WARM_UP
    run.bare_loop = bare.iteration
    grpo.train(run)
    run.close("finished")
    return [seconds[WARM_UP:] for seconds in (run.own_seconds, run.bare_seconds, run.check_seconds)]


def main() -> None:
    parser = make_parser(__doc__, iterations=30)
    parser.add_argument("--config-name", default="grpo_quickstart")
    parser.add_argument("--only", choices=("ours", "bare"), help="print the peak memory of one loop")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    config = compose_config(
        options.config_name, "optimizer.lr=0", "train.total_dialog_turns=1000000", *options.overrides
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            print_peak_memory(options.only, config, options.iterations, Path(folder))
            return
        ours, theirs, check = compare(config, options.iterations, Path(folder))
    pairs = list(zip(ours, theirs, check, strict=True))
    arguments = ["--config-name", options.config_name, *options.overrides]
    print(
        f"{describe_machine()}\n{config.model.name}, {config.prompts_per_iteration} x {config.env.repeats} "
        f"completions, {torch.get_num_threads()} threads, {options.iterations} iterations in turn"
    )
    print(f"  ours          {format_spread(ours, 4)} s, peak {measure_peak_gib('ours', arguments):.2f} GiB")
    print(f"  bare loop     {format_spread(theirs, 4)} s, peak {measure_peak_gib('bare', arguments):.2f} GiB")
    print(f"  weight check  {statistics.mean(check):.4f} s of ours, in the mean")
    print(f"  ratio         {format_spread([own / other for own, other, _ in pairs])}")
    print(f"  without check {format_spread([(own - check_s) / other for own, other, check_s in pairs])}")


if __name__ == "__main__":
    main()
