"""Trains a model on each reward, and compares the scores with an independent correctness check.

    python benchmarks/reward_attack.py [key=value ...] [--rewards math boxed ...] [--steps 60] [--seed 0]
    python benchmarks/reward_attack.py optimizer.lr=3e-5 --model FOLDER --rewards math --steps 15

Each row is a run of grpo.py on sums of operands up to 9, with an evaluation of held-out sums before and after
the run. First, the quickstart model is pretrained on sloppy answers: right and wrong sums, repeated questions,
sums in words and several answers, in every format that a reward expects (tests/envs/attack_texts.py). A model
of `--model` is not pretrained.

`paid` is the share of the final completions that the reward scores as right, `right` the share according to the
check. If the reward wrongly accepts or rejects more than 2% of the completions, the row is marked APART with
examples, and the exit code is 1.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import QUICKSTART, QUIET, ROOT, describe_machine, make_parser
from tests.envs.attack_texts import MARK_PATTERNS, MAX_ADDEND, is_right, sample_questions
from torchgrpo.models.make_quickstart import pad_batch, save_model

MAX_DISAGREEMENT = 0.02
GROUPS, REPEATS = 16, 8


def pretrain(folder: Path, seed: int, steps: int) -> Path:
    """Fine-tunes the quickstart model on sloppy answers and saves the model in `folder`."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 30, 1 - step / (steps + 1)))
    generator = random.Random(seed)
    for _ in range(steps):
        lines = sample_questions(generator, 48)
        ids, labels = pad_batch(
            tokenizer([f"<bos><user>{question}<assistant>" for question, _ in lines])["input_ids"],
            tokenizer([f"{answer}<eos>" for _, answer in lines])["input_ids"],
            tokenizer.pad_token_id,
        )
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
    save_model(model, tokenizer, folder)
    return folder


def train(reward: str, model: Path, steps: int, seed: int, overrides: list[str], run_dir: Path) -> None:
    """Trains one run, with an evaluation at its start and at its end.

    Raises:
        RuntimeError: the run ended before the first evaluation.
    """
    command = [sys.executable, "grpo.py", "--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}", *QUIET]
    command += [f"env.reward={reward}", f"env.options.max_operand={MAX_ADDEND}", f"model.name={model}"]
    command += [f"env.num_envs={GROUPS}", f"env.repeats={REPEATS}", f"train.seed={seed}", "policy.kl_coef=0"]
    command += [f"train.total_dialog_turns={steps * GROUPS * REPEATS}", "inference_model.max_tokens=44"]
    command += ["+eval.sets={attack: {dataset: arithmetic, n: 64}}", "optimizer.lr=1e-3", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not (run_dir / "eval" / "attack" / "iteration_0.jsonl").is_file():
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def report(reward: str, run_dir: Path) -> bool:
    """Prints the row of a reward; returns whether reward and check agree.

    Where they disagree, examples are printed as well.
    """
    files = sorted((run_dir / "eval" / "attack").glob("iteration_*.jsonl"), key=lambda file: int(file.stem[10:]))
    before, after = ([json.loads(line) for line in path.read_text().splitlines()] for path in (files[0], files[-1]))
    first = sum(bool(line["correct"]) for line in before) / len(before)
    scored = [
        (line, bool(line["correct"]), is_right(line["prompt"], line["completion"], MARK_PATTERNS[reward]))
        for line in after
    ]
    disagreements = Counter(
        f"{'paid' if paid else 'refused'}: {line['prompt'].strip()[-12:]!r} -> {line['completion'][-80:]!r}"
        for line, paid, right in scored
        if paid != right
    )
    errors = [sum(paid > right for _, paid, right in scored), sum(paid < right for _, paid, right in scored)]
    agree = max(errors) <= MAX_DISAGREEMENT * len(scored)
    paid, right = (sum(line[column] for line in scored) / len(scored) for column in (1, 2))
    print(
        f"{reward:18} {first:6.3f} {paid:6.3f} {right:6.3f} {paid - right:+7.3f} {len(scored):5}  "
        f"{'agree' if agree else 'APART'}",
        flush=True,
    )
    for example, count in [] if agree else disagreements.most_common(3):
        print(f"    {count} x {example}", flush=True)
    return agree


def main() -> int:
    parser = make_parser(__doc__, steps=60, seed=0, taught=1200)
    parser.add_argument("--rewards", nargs="+", default=list(MARK_PATTERNS), choices=MARK_PATTERNS, metavar="NAME")
    parser.add_argument("--model", type=Path, help="folder of a model to train without pretraining")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    print(f"{describe_machine()}\nreward             before   paid  right    diff     n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or pretrain(folder / "pretrained", options.seed, options.taught)
        overrides = options.overrides if options.model else ["env.system_prompt=''", *options.overrides]
        agree = []
        for reward in options.rewards:
            train(reward, model.resolve(), options.steps, options.seed, overrides, folder / reward)
            agree.append(report(reward, folder / reward))
    return int(not all(agree))


if __name__ == "__main__":
    sys.exit(main())
