"""Training as an attack on rewards: train against each, then read what was learned by a strict check.

    python benchmarks/reward_attack.py [key=value ...] [--rewards math boxed ...] [--steps 60] [--seed 0]
    python benchmarks/reward_attack.py optimizer.lr=3e-5 --model FOLDER --rewards math --steps 15

A row is a run of grpo.py on sums of operands up to 9 and an evaluation of held-out sums before and after it. The
quickstart model is first taught to babble: right and wrong sums, the question repeated, sums in words, several answers,
in every form that a reward asks for (tests/envs/attack_texts.py). `--model` attacks as it is.

`paid` is the share of the last completions that the reward calls right, `right` that of the check. Where more than 2%
of them are paid or refused by mistake, the row says APART with examples, and the exit code is 1.
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
from models.make_quickstart import pad_batch, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import QUICKSTART, QUIET, ROOT, arguments, machine
from tests.envs.attack_texts import FORMS, LARGEST, babble, is_right

ALLOWED = 0.02
GROUPS, REPEATS = 16, 8


def teach(folder: Path, seed: int, steps: int) -> Path:
    """Saves the quickstart model after steps of supervised babbling."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 30, 1 - step / (steps + 1)))
    chance = random.Random(seed)
    for _ in range(steps):
        lines = babble(chance, 48)
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
    save(model, tokenizer, folder)
    return folder


def train(reward: str, model: Path, steps: int, seed: int, overrides: list[str], run_dir: Path) -> None:
    """One run, with an evaluation at its start and end.

    Raises:
        RuntimeError: it ended before the first evaluation.
    """
    command = [
        sys.executable,
        "grpo.py",
        "--config-name",
        "grpo_quickstart",
        f"hydra.run.dir={run_dir}",
        *QUIET,
    ]
    command += [f"env.reward={reward}", f"env.options.max_operand={LARGEST}", f"model.name={model}"]
    command += [f"env.num_envs={GROUPS}", f"env.repeats={REPEATS}", f"train.seed={seed}", "policy.kl_coef=0"]
    command += [f"train.total_dialog_turns={steps * GROUPS * REPEATS}", "inference_model.max_tokens=44"]
    command += ["+eval.sets={attack: {dataset: arithmetic, n: 64}}", "optimizer.lr=1e-3", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not (run_dir / "eval" / "attack" / "iteration_0.jsonl").is_file():
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def report(reward: str, run_dir: Path) -> bool:
    """Prints the row, with examples where reward and check disagree; whether they agree."""
    files = sorted(
        (run_dir / "eval" / "attack").glob("iteration_*.jsonl"), key=lambda file: int(file.stem[10:])
    )
    before, after = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (files[0], files[-1])
    )
    first = sum(bool(line["correct"]) for line in before) / len(before)
    judged = [
        (line, bool(line["correct"]), is_right(line["prompt"], line["completion"], FORMS[reward]))
        for line in after
    ]
    apart = Counter(
        f"{'paid' if paid else 'refused'}: {line['prompt'].strip()[-12:]!r} -> {line['completion'][-80:]!r}"
        for line, paid, right in judged
        if paid != right
    )
    wrongly = [sum(paid > right for _, paid, right in judged), sum(paid < right for _, paid, right in judged)]
    agree = max(wrongly) <= ALLOWED * len(judged)
    paid, right = (sum(each[kind] for each in judged) / len(judged) for kind in (1, 2))
    print(
        f"{reward:18} {first:6.3f} {paid:6.3f} {right:6.3f} {paid - right:+7.3f} {len(judged):5}  "
        f"{'agree' if agree else 'APART'}",
        flush=True,
    )
    for example, count in [] if agree else apart.most_common(3):
        print(f"    {count} x {example}", flush=True)
    return agree


def main() -> int:
    parser = arguments(__doc__, steps=60, seed=0, taught=1200)
    parser.add_argument("--rewards", nargs="+", default=list(FORMS), choices=FORMS, metavar="NAME")
    parser.add_argument("--model", type=Path, help="folder of a model that attacks as it is")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    print(f"{machine()}\nreward             before   paid  right    diff     n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = asked.model or teach(folder / "babbler", asked.seed, asked.taught)
        overrides = asked.overrides if asked.model else ["env.system_prompt=''", *asked.overrides]
        agree = []
        for reward in asked.rewards:
            train(reward, model.resolve(), asked.steps, asked.seed, overrides, folder / reward)
            agree.append(report(reward, folder / reward))
    return int(not all(agree))


if __name__ == "__main__":
    sys.exit(main())
