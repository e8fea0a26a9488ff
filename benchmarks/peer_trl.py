"""An iteration of grpo.py beside one of TRL's GRPOTrainer, in turn, in the same setting.

    python benchmarks/peer_trl.py [w1 w2 ...] [--model FOLDER] [--gsm8k FILE] [--engine both|transformers|vllm]

Model, prompts, lengths, dtype and threads are the same. Either side lives in a process of its own and does one
iteration (generate, score, one AdamW step, push) while the other sleeps, so that noise meets both. Without
`--trl-python` our side runs alone. TRL has an environment of its own, with the torch and transformers of this one:

    python -m venv .cache/trl && .cache/trl/bin/pip install trl==1.16.0 torch==VERSION transformers==VERSION
    python benchmarks/peer_trl.py --trl-python .cache/trl/bin/python

Workloads (peer_sides.py): w1 is the quickstart's model; w2 a given one with forced lengths, w2-bf16 the same in
bfloat16; w3-right GSM8K with natural ends judged right or wrong, w3-dense with a reward that differs among all
completions. Without `--model` only w1 runs, without `--gsm8k` no w3. For forced lengths both read a copy of the model
whose end token has a number that its head does not have, so that nothing is forced step by step.

TRL's settings: one generation an optimizer step, hence no pass for old log-probs; no reference; no gradient
checkpointing, which costs it a third more; its default optimizer and chunked head; no logging, no saving; a microbatch
that was no slower for it than others, and ours as large. `--trl FIELD=JSON` tries others, such as `use_vllm=true`.
Ours: the defaults of a run, with ledger, metrics, doctor and weight check. Engines: both kinds on a CPU, vLLM alone on
a GPU, which learner and engine share.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
from transformers import AutoConfig, AutoTokenizer

from benchmarks.common import QUICKSTART, ROOT, arguments, machine, spread
from benchmarks.peer_sides import SEED, WORKLOADS, Job, Workload
from config.schema.env import EnvConfig
from envs.prompts import PromptSource
from envs.task import Example, make_task


def make_rows(work: Workload, count: int, gsm8k: Path | None, folder: Path) -> tuple[Path, Path]:
    """JSONL of messages and answers: a data set for a run, and the same in the order in which a run draws them."""
    if work.data == "gsm8k":
        examples = make_task(EnvConfig(dataset="gsm8k", data_files=str(gsm8k))).examples("train")[:count]
    else:
        asked = {"sums": "{}+{}=", "stories": "Tell a long story about {} men and {} women."}[work.data]
        chats = [({"role": "user", "content": asked.format(n, n % 7 + 3)},) for n in range(10, 10 + count)]
        examples = [Example(chat, "7", row) for row, chat in enumerate(chats)]
    source = PromptSource(examples, SEED, keep=lambda example: True)
    drawn = [source.draw() for _ in examples]
    paths = folder / "rows.jsonl", folder / "drawn.jsonl"
    for path, those in zip(paths, (examples, drawn), strict=True):
        rows = [{"messages": list(one.messages), "answer": one.answer} for one in those]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def never_ending(source: Path, folder: Path) -> Path:
    """A copy of a model whose end token is none that its head can draw; the one it had is a token like others."""
    shutil.copytree(source, folder)
    before = AutoTokenizer.from_pretrained(source)
    vocabulary = AutoConfig.from_pretrained(source).vocab_size
    spare = [f"<never{number}>" for number in range(max(0, vocabulary - len(before)) + 1)]
    saved = json.loads((folder / "tokenizer.json").read_text())
    for token in saved["added_tokens"]:
        token["special"] &= token["content"] != before.eos_token
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    padding = before.unk_token if before.pad_token == before.eos_token else before.pad_token
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token=spare[0], pad_token=padding)
    tokenizer.add_tokens(spare[1:])
    tokenizer.add_special_tokens({"eos_token": spare[-1]})
    end = tokenizer.eos_token_id
    assert end >= vocabulary and before.eos_token_id not in tokenizer.all_special_ids
    # A run takes the token with which the template ends an answer for an end as well.
    answered = (
        "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-1]['content'] ~ eos_token }}{% else %}"
    )
    tokenizer.chat_template = answered + before.chat_template + "{% endif %}"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        kept = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(kept | {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id})
        )
    return folder


class Side:
    """A process that does one iteration at a time; what it prints goes to a log."""

    def __init__(self, name: str, python: Path, job: Job, folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.said: list[dict[str, float]] = []
        told, self.log = folder / f"{name}.json", folder / f"{name}.log"
        job.write(told)
        read, written = os.pipe()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [str(python), str(ROOT / "benchmarks" / "peer_sides.py"), str(told), str(written)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(written,),
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"},
            )
        os.close(written)
        self.reports = os.fdopen(read)
        self._listen()

    def iterate(self) -> None:
        assert self.process.stdin is not None
        began = time.perf_counter()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self._listen()
        self.seconds.append(time.perf_counter() - began)
        self.said.append(said)

    def peak_gib(self) -> float:
        """Most resident memory that the process has had, and what its own children hold now (their share of pages)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        children = psutil.Process(self.process.pid).children(recursive=True)
        return (peak + sum(child.memory_full_info().pss for child in children)) / 2**30

    def line(self) -> str:
        """Time, work and memory of its iterations."""
        middle = {key: statistics.median(said[key] for said in self.said) for key in self.said[0]}
        work = {key: middle.pop(key) for key in ("tokens", "prompt_tokens", "reward")}
        stages = ", ".join(f"{stage} {value:.3f}" for stage, value in middle.items())
        return (
            f"  {self.name:<18} {spread(self.seconds)} s, peak {self.peak_gib():.2f} GiB, {work['tokens']:.0f} tokens "
            f"after {work['prompt_tokens']:.0f} of prompts, reward {work['reward']:.3f}\n  {'':<18} {stages}"
        )

    def _listen(self) -> dict[str, float]:
        line = self.reports.readline()
        if not line:
            last = "\n".join(self.log.read_text().splitlines()[-30:])
            raise SystemExit(f"{self.name} has ended early:\n{last}")
        said: dict[str, float] = json.loads(line)
        return said


def measure(sides: Sequence[Side], warm_up: int, iterations: int, limit_s: float) -> None:
    """Iterations of all sides in turn; who begins changes from one to the next. None begins after `limit_s`."""
    end = time.monotonic() + limit_s
    for number in range(warm_up + iterations):
        if time.monotonic() > end:
            break
        shift = number % len(sides)
        for side in (*sides[shift:], *sides[:shift]):
            side.iterate()
            print(f"  {number + 1}: {side.name} {side.seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    for side in sides:
        del side.seconds[:warm_up], side.said[:warm_up]


def start(
    work: Workload, asked: argparse.Namespace, engines: Sequence[str], folder: Path, ending: ExitStack
) -> list[Side]:
    """Starts ours by each engine, then TRL; `ending` stops them."""
    model = QUICKSTART if work.model == "quickstart" else asked.model.resolve()
    if work.forced:
        model = never_ending(model, folder / "model")
    rounds = asked.warm_up + asked.iterations
    rows, drawn = make_rows(work, rounds * work.prompts, asked.gsm8k, folder)
    job = Job(work, str(model), str(rows), rounds, asked.threads, "", tuple(asked.own))
    orders = {f"ours, {engine}": (Path(sys.executable), replace(job, engine=engine)) for engine in engines}
    if asked.trl_python:
        theirs = replace(job, rows=str(drawn), engine="trl", options=tuple(asked.trl))
        orders["TRL"] = (asked.trl_python.absolute(), theirs)
    sides = []
    for name, (python, order) in orders.items():
        sides.append(Side(name, python, order, folder))
        ending.callback(sides[-1].process.kill)
    return sides


def run(work: Workload, asked: argparse.Namespace, engines: Sequence[str]) -> None:
    """Measures one workload and prints it."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        sides = start(work, asked, engines, folder, ending)
        measure(sides, asked.warm_up, asked.iterations, asked.limit)
        print(
            f"{work.name}: {work.prompts} x {work.repeats} x {work.max_tokens} tokens "
            f"({'forced' if work.forced else 'free'}), {work.model} model, {work.dtype}, {work.reward}, "
            f"{asked.threads} threads, {len(sides[0].seconds)} iterations in turn after {asked.warm_up}"
        )
        print(*(side.line() for side in sides), sep="\n", flush=True)
    for own in sides[:-1] if asked.trl_python else []:
        other = sides[-1]
        pairs = [theirs / ours for ours, theirs in zip(own.seconds, other.seconds, strict=True)]
        tokens = [sum(said["tokens"] for said in side.said) for side in (own, other)]
        a_token = sum(other.seconds) / tokens[1] / (sum(own.seconds) / tokens[0])
        print(f"  TRL over {own.name}: {spread(pairs)} pair by pair, {a_token:.3f} a token", flush=True)


def main() -> None:
    parser = arguments(__doc__, iterations=8, warm_up=2, limit=600, threads=os.cpu_count() or 1)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--model", type=Path, help="folder of the model of all workloads but w1")
    parser.add_argument("--gsm8k", type=Path, help="file of GSM8K's rows, train.jsonl, for w3")
    parser.add_argument("--engine", choices=("both", "transformers", "vllm"), default="both")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL")
    parser.add_argument("--trl", nargs="*", default=[], metavar="FIELD=JSON", help="of TRL's GRPOConfig")
    parser.add_argument("--own", nargs="*", default=[], metavar="KEY=VALUE", help="of our config")
    asked = parser.parse_args()
    if unknown := set(asked.workloads) - set(WORKLOADS):
        parser.error(f"no workload {unknown.pop()!r}; there are {', '.join(WORKLOADS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that both sides are stopped too
    engines = [asked.engine]
    if asked.engine == "both":
        engines = [] if torch.cuda.is_available() else ["transformers"]
        engines += ["vllm"] if find_spec("vllm") else []
    print(machine())
    for work in [WORKLOADS[name] for name in asked.workloads or WORKLOADS]:
        if (work.model == "quickstart" or asked.model) and (work.data != "gsm8k" or asked.gsm8k):
            run(work, asked, engines)
        else:
            print(f"{work.name}: left out, it needs --model" + (" and --gsm8k" if "w3" in work.name else ""))


if __name__ == "__main__":
    main()
