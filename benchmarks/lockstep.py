"""Wall time of one lockstep iteration beside the same work in a bare loop, in one process, in turn.

    python benchmarks/lockstep.py [--iterations 30] [key=value ...]

Prints seconds per iteration of grpo.py's loop (collect, advantage, learn, push, metrics) and of
benchmarks/bare_loop.py, which shares prompts likewise and has no framework; medians of alternating runs, the
ratio pair by pair, and the peak memory of either, each alone in a process of its own. Both train from the same
weights on the same prompts.
"""

import argparse
import copy
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

import grpo  # noqa: E402
from benchmarks.bare_loop import Bare  # noqa: E402
from config.composition import register_schema, to_config  # noqa: E402
from config.schema import Config  # noqa: E402
from envs.task import Example, make_task  # noqa: E402
from run.build import build  # noqa: E402
from run.lockstep import Lockstep  # noqa: E402
from run.run import Run  # noqa: E402
from training.adapters import causal_model  # noqa: E402
from training.local_learner import LocalLearner  # noqa: E402
from training.model_loading import load_model, load_tokenizer  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402

WARM_UP = 3


class Timed(Lockstep):
    """grpo.py's loop for some iterations, each timed; a bare loop's comes before each, where there is one."""

    iterations_left = 0
    examples_for: Callable[[list[Example]], None] = staticmethod(lambda examples: None)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.check: list[float] = []

    def iterations(self) -> Iterator[int]:
        for iteration in range(1, self.iterations_left + 1):
            begun = self.run.prompts.begin(self.run.config.prompts_per_iteration)
            examples = [example for _, example in begun]
            began = time.perf_counter()
            self.examples_for(examples)
            middle = time.perf_counter()
            yield iteration
            self.ours.append(time.perf_counter() - middle)
            self.bare.append(middle - began)

    def push_weights(self) -> None:
        super().push_weights()
        if self.run.weights.version > 0:
            self.check.append(self.run.monitor.extra.get("weight_check/seconds", 0.0))

    def done(self, iteration: int) -> None:
        """The ledger, but neither evaluation nor checkpoint, which a bare loop has not."""
        self.run.monitor.consumed(iteration, list(self.run.groups.values()), [])


def make_bare(config: Config, model: PreTrainedModel) -> Bare:
    own, reference = (copy.deepcopy(model) for _ in range(2))
    tokenizer = load_tokenizer(config.model)
    return Bare(
        own.train(),
        reference.eval(),
        tokenizer,
        make_optimizer(own, config.optimizer),
        config.env.repeats,
        config.inference_model.max_tokens,
        config.policy.kl_coef,
        tokenizer.eos_token_id,
    )


def iterate_bare(bare: Bare, examples: Sequence[Example]) -> None:
    bare.iteration([list(e.messages) for e in examples], [e.answer for e in examples])


def peak_alone(which: str, iterations: int, config_name: str, overrides: Sequence[str]) -> float:
    """GiB of resident memory that a process of its own reaches."""
    command = [sys.executable, __file__, "--only", which, "--iterations", str(iterations)]
    command += ["--config-name", config_name, *overrides]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def run_alone(which: str, config: Config, iterations: int) -> None:
    """Prints the peak after some iterations of one of the two."""
    with tempfile.TemporaryDirectory() as folder:
        if which == "ours":
            working = build(config, Path(folder), Timed)
            working.iterations_left = iterations
            grpo.train(working)
            working.run.close("finished")
        else:
            torch.set_num_threads(config.train_model.num_threads or torch.get_num_threads())
            bare = make_bare(config, load_model(config.model, torch.device("cpu")))
            examples = itertools.cycle(make_task(config.env).examples("train"))
            for _ in range(iterations):
                iterate_bare(bare, list(itertools.islice(examples, config.prompts_per_iteration)))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--config-name", default="grpo_quickstart")
    parser.add_argument("--only", choices=("ours", "bare"), help="print the peak memory of one, alone")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    register_schema()
    quiet = [
        "logging.progress=false",
        "logging.sample_frequency=0",
        "optimizer.lr=0",
        "train.total_dialog_turns=1000000",
    ]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        config = to_config(compose(asked.config_name, overrides=[*quiet, *asked.overrides]))
    if asked.only:
        run_alone(asked.only, config, asked.iterations)
        return
    with tempfile.TemporaryDirectory() as folder:
        working = build(config, Path(folder), Timed)
        assert isinstance(working.run.learner, LocalLearner)
        bare = make_bare(config, causal_model(working.run.learner.worker.model))
        working.iterations_left = asked.iterations + WARM_UP
        working.examples_for = partial(iterate_bare, bare)
        grpo.train(working)
        working.run.close("finished")
    ours, theirs, check = (taken[WARM_UP:] for taken in (working.ours, working.bare, working.check))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    unchecked = [(a - c) / b for a, b, c in zip(ours, theirs, check, strict=True)]
    peaks = {which: peak_alone(which, 5, asked.config_name, asked.overrides) for which in ("ours", "bare")}
    print(
        f"model {config.model.name}, {config.prompts_per_iteration} x {config.env.repeats} completions, "
        f"{torch.get_num_threads()} threads, {asked.iterations} alternating iterations, medians"
    )
    print(f"  ours      {statistics.median(ours):.4f} s")
    print(f"  bare loop {statistics.median(theirs):.4f} s")
    print(f"  check     {statistics.mean(check):.4f} s of ours, in the mean")
    print(f"  ratio     {statistics.median(unchecked):.3f}  (target <= 1.05)")
    print(f"  ratio     {statistics.median(ratios):.3f}  with the weight check, which the bare loop has not")
    print(f"  peak memory: ours {peaks['ours']:.2f} GiB, bare loop {peaks['bare']:.2f} GiB")


if __name__ == "__main__":
    main()
