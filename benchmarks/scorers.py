"""An optimizer step with a scorer in its own process, beside its two halves alone.

    python benchmarks/scorers.py [--rounds 5] [--prompts 16] [--repeats 8] [--microbatches 16]

A random Llama learns on one thread; a scorer on another thread has a copy with as many more layers as make it about as
slow as the learner. In turn: a step with log-probs that are there already (`learner`), the scorer scoring all
microbatches while nobody learns (`scorer`), and a step that waits for the scorer (`together`). Prints the medians, and
`together` over the longer of the two and over their sum. Groups arrive as `benchmarks/ranks.py` draws them.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks import drawn, timed
from config.env import EnvConfig
from config.inference import InferenceModelConfig
from config.models import ModelConfig, RefModelConfig, TrainModelConfig
from config.optimizer import OptimizerConfig
from config.policy import PolicyConfig
from config.schema import Config
from config.train import TrainConfig
from plan.machine import this_machine
from plan.make_plan import make_plan
from training.batch import Batch
from training.local_learner import LocalLearner, make_learner
from training.process import prepare_process

VOCABULARY, WIDTH, LAYERS = 4096, 384, 4


def llama(folder: Path, layers: int) -> str:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def learner_of(policy: str, reference: str, asked: argparse.Namespace, folder: Path) -> LocalLearner:
    config = Config(
        env=EnvConfig(dataset="arithmetic", num_envs=asked.prompts, repeats=asked.repeats),
        model=ModelConfig(name=policy),
        train=TrainConfig(gradient_accumulation_steps=asked.microbatches),
        train_model=TrainModelConfig(num_threads=1),
        ref_model=RefModelConfig(name=reference, num_devices=1),
        policy=PolicyConfig(kl_coef=0.1),
        optimizer=OptimizerConfig(lr=1e-5),
        inference_model=InferenceModelConfig(max_tokens=asked.limit, backend="transformers"),
        device="cpu",
    )
    config.derive()
    plan = make_plan(config, False, this_machine(folder), folder)
    plan = replace(plan, reference=replace(plan.reference, num_threads=1))
    prepare_process(config, 1, torch.device("cpu"))
    return make_learner(config, plan, folder)


def seconds(learner: LocalLearner, batch: Batch) -> dict[str, float]:
    """One round: the learner alone, the scorer alone, both."""
    scorers = learner.scorers
    assert scorers is not None
    pieces = [piece.batch for piece in learner._shares(batch)[0]]

    def score() -> None:
        for scored in [scorers.begin(piece) for piece in pieces]:
            scorers.wait(scored)

    there = batch.copy()
    there.ref_log_prob = torch.zeros_like(batch.sample_log_prob)
    return {
        "learner": timed(lambda: learner.step(there))[0],
        "scorer": timed(score)[0],
        "together": timed(lambda: learner.step(batch))[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = (
        ("rounds", 5),
        ("prompts", 16),
        ("repeats", 8),
        ("prompt", 32),
        ("limit", 64),
        ("microbatches", 16),
    )
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    groups = drawn(asked, VOCABULARY)
    with tempfile.TemporaryDirectory() as name:
        folder, layers = Path(name), LAYERS
        policy = llama(folder / "policy", LAYERS)
        for _ in range(2):
            learner = learner_of(policy, llama(folder / f"reference{layers}", layers), asked, folder)
            batch = learner.credit(groups)
            first = [seconds(learner, batch) for _ in range(2)][1]
            if abs(first["scorer"] / first["learner"] - 1) < 0.15:
                break
            layers = max(1, round(layers * first["learner"] / first["scorer"]))
            learner.close()
        else:
            learner = learner_of(policy, llama(folder / f"reference{layers}", layers), asked, folder)
            seconds(learner, batch)
        rounds = [seconds(learner, batch) for _ in range(asked.rounds)]
        learner.close()
    middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    pairs = [(one["together"], one["learner"], one["scorer"]) for one in rounds]
    print(f"policy of {LAYERS} layers, reference of {layers}, {asked.microbatches} microbatches")
    print(", ".join(f"{key} {value:.3f} s" for key, value in middle.items()))
    longer = statistics.median(both / max(own, other) for both, own, other in pairs)
    total = statistics.median(both / (own + other) for both, own, other in pairs)
    print(f"together: {longer:.2f} of the longer one, {total:.2f} of their sum")


if __name__ == "__main__":
    main()
