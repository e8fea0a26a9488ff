"""Training is the strongest attack on a judge: train against each reward, then read what was learned.

    python benchmarks/reward_attack.py [--only SUBSTRING ...] [--steps 40] [--seed 0] [--keep FOLDER]
    python benchmarks/reward_attack.py --model SMOLLM2_FOLDER --gsm8k GSM8K_FOLDER

Every row is one run of grpo.py and an evaluation on held-out prompts before and after it, 640 sampled completions or
so. Without `--model` the quickstart model attacks all tasks and rewards: first it is taught to babble (right answers,
wrong ones, the question repeated, sums in words, several answers, in every form that a reward may ask for), so that
whatever is paid by mistake is tried. With `--model` a real instruction model attacks arithmetic, countdown and GSM8K.

`paid` is the share of the last completions that the reward calls right, `right` that of an independent strict check
(`attack_material.py`). Where more than 2% of them are paid or refused by mistake, the row says so and shows examples.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import attack_material as material  # noqa: E402

from envs.sandbox.limits import Limits  # noqa: E402
from envs.sandbox.sandbox import Sandbox  # noqa: E402

ALLOWED = 0.02
EXAMPLES = 3
TAGS = r"<answer>(.*?)</answer>"
SMALL_SUMS = f"env.options.max_operand={material.LARGEST}"


@dataclass(frozen=True)
class Attack:
    """One row: what is trained, and the check of its answers.

    held_out: the fields of the evaluation set that differ from `env`, in Hydra's spelling. groups, repeats: prompts
    of a step, and completions of each. taught: whether the quickstart model first babbles of `sums` or `others`; as it
    is, it answers sums and nothing else, which is enough where no form is asked for.
    """

    task: str
    reward: str
    check: material.Check
    overrides: tuple[str, ...] = ()
    held_out: str = ""
    tokens: int = 44
    groups: int = 16
    repeats: int = 8
    evaluated: int = 64
    taught: str = "sums"


@dataclass
class Learned:
    """What one evaluation says, in shares of its completions."""

    score: float
    paid: float
    right: float
    wrongly_paid: float
    wrongly_refused: float
    completions: int
    examples: Counter[tuple[str, str, bool]] = field(default_factory=Counter)


def read(path: Path, check: material.Check) -> Learned:
    """The judge's verdict and the check's on each completion of an evaluation's file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [(line, check(line["prompt"], line["completion"])) for line in lines]
    count = len(lines)
    apart = Counter(
        (line["prompt"].strip()[-60:], line["completion"][-80:], bool(line["correct"]))
        for line, right in pairs
        if bool(line["correct"]) != right
    )
    return Learned(
        score=sum(line["score"] for line in lines) / count,
        paid=sum(bool(line["correct"]) for line in lines) / count,
        right=sum(right for _, right in pairs) / count,
        wrongly_paid=sum(bool(line["correct"]) and not right for line, right in pairs) / count,
        wrongly_refused=sum(right and not line["correct"] for line, right in pairs) / count,
        completions=count,
        examples=apart,
    )


def of_files(folder: Path, stem: str) -> tuple[str, ...]:
    return (f"env.data_files={{train: {folder}/{stem}_train.jsonl, test: {folder}/{stem}_test.jsonl}}",)


def quickstart_attacks(folder: Path, run: Callable[[str, str], str]) -> list[Attack]:
    """Every task and every named reward; all prompts are as short as the task allows."""
    forms = {
        "math": "",
        "exact": "",
        "boxed": material.BOXED,
        "think_answer_tags": TAGS,
        "gsm8k": "####(.*)",
        "dapo": r"[Aa]nswer:(.*)",
    }
    attacks = [Attack("arithmetic", "own", material.adds())]
    attacks += [
        Attack("arithmetic", reward, material.adds(pattern), (f"env.reward={reward}",))
        for reward, pattern in forms.items()
    ]
    for task, pattern, stem in (
        ("gsm8k", forms["gsm8k"], "gsm8k"),
        ("math", "", "math"),
        ("aime", "", "math"),
        ("dapo_math", forms["dapo"], "math"),
        ("jsonl", "", "jsonl"),
    ):
        attacks.append(Attack(task, "own", material.adds(pattern), of_files(folder, stem)))
    members = f"{{arithmetic: {{weight: 1, options: {{max_operand: {material.LARGEST}}}}}, "
    members += f"jsonl: {{weight: 1, data_files: {folder}/jsonl_train.jsonl, system_prompt: ''}}}}"
    mixed = (f"env.mixture={members}",)
    attacks.append(Attack("mixture", "own", material.adds(), mixed, "split: train, limit: 20"))
    bare = {"own", "math", "exact"}
    attacks = [
        replace(attack, taught="", tokens=8)
        if attack.reward in bare and attack.task not in ("gsm8k", "dapo_math")
        else attack
        for attack in attacks
    ]
    others = [replace(attack, taught="others") for attack in other_attacks(folder, run)]
    return [
        replace(attack, overrides=(*attack.overrides, SMALL_SUMS)) if attack.task == "arithmetic" else attack
        for attack in attacks + others
    ]


def other_attacks(folder: Path, run: Callable[[str, str], str]) -> list[Attack]:
    """The tasks that are no additions. run(source, stdin) -> stdout, shut in."""
    puzzles = "max_numbers: 2, min_numbers: 2, max_number: 9, max_target: 81, num_rows: "
    chains = "{name: chain_sum, min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, num_rows: 100}"
    same = "split: train"
    return [
        Attack("jsonl", "fractions", material.reduces, of_files(folder, "fractions")),
        Attack(
            "countdown",
            "own",
            material.counts_down,
            (f"env.options={{{puzzles}60}}",),
            f"options: {{{puzzles}8}}",
        ),
        Attack("reasoning_gym", "own", material.chains, (f"env.options={chains}",)),
        Attack("ifeval", "own", material.follows, (f"env.data_files={folder}/ifeval.jsonl",), same, 12),
        Attack("code", "own", material.programs(run), (f"env.data_files={folder}/code.jsonl",), same, 72),
    ]


def model_attacks(gsm8k: Path | None) -> list[Attack]:
    """What an instruction model of 135M parameters can be trained on in minutes."""
    add = "env.system_prompt='You add two numbers and reply with the sum only.'"
    attacks = [
        Attack(
            "arithmetic",
            "math",
            material.adds(),
            (SMALL_SUMS, "env.reward=math", add, "optimizer.lr=3e-5"),
            tokens=8,
            groups=8,
        )
    ]
    puzzles = "max_numbers: 2, min_numbers: 2, max_number: 9, max_target: 81, num_rows: "
    solve = "env.system_prompt='Reach the target with the numbers and + - *. Reply like this: <answer>2+3</answer>'"
    attacks.append(
        Attack(
            "countdown",
            "own",
            material.counts_down,
            (f"env.options={{{puzzles}60}}", solve, "env.max_prompt_tokens=128", "optimizer.lr=3e-5"),
            f"options: {{{puzzles}8}}",
            tokens=16,
            groups=4,
        )
    )
    if gsm8k is not None:
        files = f"env.data_files={{train: {gsm8k}/train.jsonl, test: {gsm8k}/test.jsonl}}"
        brief = "env.system_prompt='Reply with #### and the final number.'"
        attacks.append(
            Attack(
                "gsm8k",
                "own",
                material.word_problem(gsm8k / "test.jsonl"),
                (files, brief, "env.max_prompt_tokens=96", "optimizer.lr=3e-5"),
                "limit: 50",
                tokens=24,
                groups=4,
                evaluated=10,
            )
        )
    return attacks


def babbler(folder: Path, seed: int, taught: str, steps: int = 1200) -> Path:
    """The quickstart model, taught answers of every kind to additions or to the other tasks; an HF folder."""
    made = folder / f"babbler_{taught}" if taught else ROOT / "models" / "quickstart"
    if made.is_dir():
        return made
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from models.make_quickstart import pad_batch, save

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "quickstart")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "quickstart")
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 30, 1 - step / (steps + 1)))
    chance = random.Random(seed)
    for _ in range(steps):
        lines = material.babble(chance, 48, taught == "sums")
        ids, labels = pad_batch(
            tokenizer([f"<bos><user>{question}<assistant>" for question, _ in lines])["input_ids"],
            tokenizer([f"{answer}<eos>" for _, answer in lines])["input_ids"],
            tokenizer.pad_token_id,
        )
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
    save(model, tokenizer, made)
    return made


def train(
    attack: Attack, model: Path, common: Sequence[str], steps: int, run_dir: Path
) -> list[dict[str, Any]]:
    """One run; the rows of its metrics. A run that ended early because nothing was paid still has its evaluation.

    Raises:
        RuntimeError: it ended before the first evaluation.
    """
    held_out = "".join(f", {part}" for part in (attack.held_out,) if part)
    command = [sys.executable, "grpo.py", "--config-name", "grpo_quickstart", f"hydra.run.dir={run_dir}"]
    if attack.task != "arithmetic":
        command.append("~env.options.max_operand")
    command += [
        f"env.dataset={attack.task}",
        f"model.name={model}",
        f"inference_model.max_tokens={attack.tokens}",
    ]
    command += ["policy.kl_coef=0", "logging.progress=false", "train.checkpoint_frequency=1000000", *common]
    command += attack.overrides
    command.append(f"+eval.sets={{attack: {{dataset: {attack.task}, n: {attack.evaluated}{held_out}}}}}")
    command += [f"env.num_envs={attack.groups}", f"env.repeats={attack.repeats}"]
    command.append(f"train.total_dialog_turns={steps * attack.groups * attack.repeats}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not (run_dir / "eval" / "attack" / "iteration_0.jsonl").is_file():
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    metrics = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    return [row for row in rows if "reward/mean" in row]


def report(attack: Attack, model: str, run_dir: Path, rows: list[dict[str, Any]], seconds: float) -> bool:
    """Prints the row, and examples where check and reward disagree; whether they agree."""
    files = sorted(
        (run_dir / "eval" / "attack").glob("iteration_*.jsonl"), key=lambda path: int(path.stem[10:])
    )
    first, last = (read(path, attack.check) for path in (files[0], files[-1]))
    agree = max(last.wrongly_paid, last.wrongly_refused) <= ALLOWED
    print(
        f"{attack.task:17s} {attack.reward:18s} {model:11s} {len(rows):5d} {first.paid:6.3f} "
        f"{last.score:6.3f} {last.paid:6.3f} {last.right:6.3f} {last.paid - last.right:+7.3f} {last.completions:5d} "
        f"{seconds:5.0f}  {'agree' if agree else 'APART'}",
        flush=True,
    )
    if not agree:
        for (prompt, answer, paid), count in last.examples.most_common(EXAMPLES):
            print(f"    {count} x {'paid' if paid else 'refused'}: {prompt!r} -> {answer!r}", flush=True)
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows whose `task reward` contains one of these"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="HF folder of an instruction model")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--keep", type=Path, help="folder for the runs; a temporary one otherwise")
    asked, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary, Sandbox(limits=Limits(wall_seconds=2.0)) as sandbox:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        material.write_rows(folder)
        common = [f"train.seed={asked.seed}"]
        if asked.model:
            attacks = model_attacks(asked.gsm8k)
        else:
            attacks = quickstart_attacks(folder, lambda code, text: _output(sandbox, code, text))
            common += [
                "env.system_prompt=''",
                "env.num_envs=16",
                "optimizer.lr=1e-3",
                "env.max_prompt_tokens=128",
            ]
        print(
            "task              reward             model       steps before  score   paid  right    diff     n "
            "    s",
            flush=True,
        )
        apart = 0
        for number, attack in enumerate(attacks):
            if not any(part in f"{attack.task} {attack.reward}" for part in asked.only):
                continue
            run_dir = folder / f"run_{number}_{attack.task}_{attack.reward}"
            model = asked.model or babbler(folder, asked.seed, attack.taught)
            began = time.perf_counter()
            rows = train(attack, model.resolve(), [*common, *overrides], asked.steps, run_dir)
            apart += not report(attack, model.name, run_dir, rows, time.perf_counter() - began)
    return int(apart > 0)


def _output(sandbox: Sandbox, code: str, text: str) -> str:
    return sandbox.run(code, text.encode()).stdout.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
