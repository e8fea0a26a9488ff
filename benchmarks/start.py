"""From a command to what it shows: the commands that start nothing, and the first answer of the quickstart.

    python benchmarks/start.py [--runs 5] [--root OTHER_CHECKOUT] [--only commands|first]

Every command is a process of its own, timed from outside; they take turns, and the first round, which warms the disk,
does not count. Medians of wall seconds and, which other work disturbs less, of CPU seconds.

`first answer` is the time from the command until the engine has drawn the last token of the first group, three or four
tokens after its first one (`drawn` in the ledger). It is split at the lines that the run prints while it starts and at
the events that it writes. Beside it `bare`: a script that loads the same model with transformers alone, and draws one
token.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from monitoring.ledger_storage import read_records  # noqa: E402

QUICKSTART = ("--config-name", "grpo_quickstart")
COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import hydra": ("-c", "import hydra"),
    "--help": ("grpo.py", "--help"),
    "a wrong key": ("grpo.py", *QUICKSTART, "train.learning_rate=1"),
    "run=plan": ("grpo.py", *QUICKSTART, "run=plan"),
    "import torch": ("-c", "import torch"),
}
BARE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("models/quickstart")
model = AutoModelForCausalLM.from_pretrained("models/quickstart")
ids = torch.tensor([tokenizer("1+1=")["input_ids"]])
with torch.inference_mode():
    print(model(ids).logits[0, -1].argmax().item(), flush=True)
"""
STAGES = {
    "starting": "interpreter, composing",
    "reading data": "imports",
    "starting engines": "tokenizer, prompts",
    "loading the model": "engine with its model",
    "begun": "learner with its model",
    "pushed": "first push, weight check",
    "drawn": "first group drawn",
}
"""What is seen at the end of a stage, and what the stage was."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a process and of those that it waited for."""

    wall: float
    cpu: float


def timed(arguments: tuple[str, ...], root: Path) -> Cost:
    before, began = _children_cpu(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], cwd=root, capture_output=True, env=_environment(), check=False
    )
    return Cost(time.perf_counter() - began, _children_cpu() - before)


def first_answer(root: Path) -> dict[str, float]:
    """Seconds from the command to the end of each of `STAGES`. Raises RuntimeError with what a failing run printed."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["grpo.py", *QUICKSTART, "train.total_dialog_turns=256", f"hydra.run.dir={run_dir}"]
        began = time.time()
        run = subprocess.Popen(
            [sys.executable, *words], cwd=root, env=_environment(), stderr=subprocess.PIPE, text=True
        )
        assert run.stderr is not None
        printed, seen = [], {}
        for line in run.stderr:
            printed.append(line)
            seen.setdefault(line.strip(), time.time() - began)
        if run.wait():
            raise RuntimeError("".join(printed))
        for text in (run_dir / "events.jsonl").read_text().splitlines():
            event = json.loads(text)
            seen.setdefault(event["event"], event["time"] - began)
        seen["drawn"] = min(record["drawn"] for record in read_records(run_dir)) - began
    return {stage: seen[stage] for stage in STAGES}


def bare() -> float:
    """Seconds until the script `BARE` has printed its token."""
    began = time.perf_counter()
    run = subprocess.Popen(
        [sys.executable, "-c", BARE],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert run.stdout is not None
    run.stdout.readline()
    seconds = time.perf_counter() - began
    run.communicate()
    return seconds


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def print_commands(runs: int, root: Path) -> None:
    rounds = [{name: timed(words, root) for name, words in COMMANDS.items()} for _ in range(runs + 1)][1:]
    print("command           wall s    range        cpu s")
    for name in COMMANDS:
        wall = [one[name].wall for one in rounds]
        cpu = statistics.median(one[name].cpu for one in rounds)
        print(f"{name:16s}  {statistics.median(wall):6.2f}  {min(wall):5.2f}-{max(wall):5.2f}  {cpu:8.2f}")


def print_first(runs: int, root: Path) -> None:
    rounds = [(first_answer(root), bare()) for _ in range(runs + 1)][1:]
    print("\nstage                     s    at")
    before = dict.fromkeys(range(runs), 0.0)
    for stage, name in STAGES.items():
        at = [seen[stage] for seen, _ in rounds]
        spent = statistics.median(end - before[index] for index, end in enumerate(at))
        print(f"{name:22s}  {spent:5.2f}  {statistics.median(at):5.2f}")
        before = dict(enumerate(at))
    ours, bares = [seen["drawn"] for seen, _ in rounds], [seconds for _, seconds in rounds]
    ratio = statistics.median(one / other for one, other in zip(ours, bares, strict=True))
    print(f"first answer  {statistics.median(ours):.2f} s ({min(ours):.2f}-{max(ours):.2f})")
    print(
        f"bare          {statistics.median(bares):.2f} s ({min(bares):.2f}-{max(bares):.2f})   ratio {ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose scripts are timed")
    parser.add_argument("--only", choices=("commands", "first"))
    asked = parser.parse_args()
    if asked.only != "first":
        print_commands(asked.runs, asked.root)
    if asked.only != "commands":
        print_first(asked.runs, asked.root)


if __name__ == "__main__":
    main()
