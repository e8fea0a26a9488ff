"""Compares time and memory of iterations of grpo.py and TRL's GRPOTrainer on equal workloads.

    python benchmarks/peer_trl.py [w1 w2 ...] [--model FOLDER] [--gsm8k FILE] [--engine both|transformers|vllm]

Model, prompts, lengths, dtype and threads are the same. Each side runs in a separate process and does one
iteration (generate, score, one AdamW step, push) while the other side sleeps, so that noise affects both.
Without `--trl-python` only our side runs. TRL has a separate environment, with the same versions of torch and
transformers:

    python -m venv .cache/trl && .cache/trl/bin/pip install trl==1.16.0 torch==VERSION transformers==VERSION
    python benchmarks/peer_trl.py --trl-python .cache/trl/bin/python

Workloads (peer_processes.py): w1 uses the quickstart's model; w2 the model of `--model` with forced lengths,
w2-bf16 the same in bfloat16; w3-right uses GSM8K with natural lengths and scores completions as right or wrong;
w3-dense has a reward that differs among all completions. Without `--model` only w1 runs, without `--gsm8k` no
w3. For forced lengths, both sides load a copy of the model whose end token has an id that the output head
lacks, so that no step needs special treatment.

TRL's settings: one generation per optimizer step, hence no pass for old log-probs; no reference; no gradient
checkpointing, which would make TRL slower; TRL's default optimizer and chunked head; no logging, no saving; the
fastest microbatch size for TRL, which our side uses too. `--trl FIELD=JSON` sets other fields, such as
`use_vllm=true`. Our
settings: the defaults of a run, with ledger, metrics, diagnostics and weight check. Engines: both kinds on a
CPU, only vLLM on a GPU, which learner and engine share.
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

from benchmarks.common import QUICKSTART, ROOT, describe_machine, format_spread, make_parser
from benchmarks.peer_processes import SEED, WORKLOADS, Job, Workload
from config.schema.env import EnvConfig
from envs.prompts import PromptSource
from envs.task import Example, make_task


def make_rows(work: Workload, count: int, gsm8k: Path | None, folder: Path) -> tuple[Path, Path]:
    """Writes two JSONL files with messages and answers of a workload.

    The first file is the data set, the second has the same rows in the order in which a run samples them.
    """
    if work.data == "gsm8k":
        examples = make_task(EnvConfig(dataset="gsm8k", data_files=str(gsm8k))).examples("train")[:count]
    else:
        question = {"sums": "{}+{}=", "stories": "Tell a long story about {} men and {} women."}[work.data]
        chats = [({"role": "user", "content": question.format(n, n % 7 + 3)},) for n in range(10, 10 + count)]
        examples = [Example(chat, "7", row) for row, chat in enumerate(chats)]
    source = PromptSource(examples, SEED, fits_limit=lambda example: True)
    ordered = [source.next_example() for _ in examples]
    paths = folder / "rows.jsonl", folder / "ordered.jsonl"
    for path, file_examples in zip(paths, (examples, ordered), strict=True):
        rows = [{"messages": list(example.messages), "answer": example.answer} for example in file_examples]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def remove_end_token(source: Path, folder: Path) -> Path:
    """Copies a model, giving its end token an id that cannot be sampled.

    The former end token becomes an ordinary token.
    """
    shutil.copytree(source, folder)
    original = AutoTokenizer.from_pretrained(source)
    vocabulary = AutoConfig.from_pretrained(source).vocab_size
    spare = [f"<never{number}>" for number in range(max(0, vocabulary - len(original)) + 1)]
    saved = json.loads((folder / "tokenizer.json").read_text())
    for token in saved["added_tokens"]:
        token["special"] &= token["content"] != original.eos_token
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    padding = original.unk_token if original.pad_token == original.eos_token else original.pad_token
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token=spare[0], pad_token=padding)
    tokenizer.add_tokens(spare[1:])
    tokenizer.add_special_tokens({"eos_token": spare[-1]})
    end = tokenizer.eos_token_id
    assert end >= vocabulary and original.eos_token_id not in tokenizer.all_special_ids
    # A run also treats the last token of an answer in the chat template as an end token.
    answer_template = "{% if messages[-1]['role'] == 'assistant' %}{{ messages[-1]['content'] ~ eos_token }}{% else %}"
    tokenizer.chat_template = answer_template + original.chat_template + "{% endif %}"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}))
    return folder


class Side:
    """A process that runs one iteration at a time, with its output in a log."""

    def __init__(self, name: str, python: Path, job: Job, folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.reports: list[dict[str, float]] = []
        job_file, self.log = folder / f"{name}.json", folder / f"{name}.log"
        job.write(job_file)
        read, written = os.pipe()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [str(python), str(ROOT / "benchmarks" / "peer_processes.py"), str(job_file), str(written)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(written,),
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"},
            )
        os.close(written)
        self.report_stream = os.fdopen(read)
        self._read_report()

    def iterate(self) -> None:
        assert self.process.stdin is not None
        start = time.perf_counter()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        report = self._read_report()
        self.seconds.append(time.perf_counter() - start)
        self.reports.append(report)

    def peak_gib(self) -> float:
        """Returns the process's peak resident memory plus the children's present memory.

        The memory of a child is its proportional share of pages.
        """
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        children = psutil.Process(self.process.pid).children(recursive=True)
        return (peak + sum(child.memory_full_info().pss for child in children)) / 2**30

    def line(self) -> str:
        """Formats time, work and memory of the iterations."""
        medians = {key: statistics.median(report[key] for report in self.reports) for key in self.reports[0]}
        work = {key: medians.pop(key) for key in ("tokens", "prompt_tokens", "reward")}
        stages = ", ".join(f"{stage} {value:.3f}" for stage, value in medians.items())
        return (
            f"  {self.name:<18} {format_spread(self.seconds)} s, peak {self.peak_gib():.2f} GiB, "
            f"{work['tokens']:.0f} tokens after {work['prompt_tokens']:.0f} of prompts, reward {work['reward']:.3f}"
            f"\n  {'':<18} {stages}"
        )

    def _read_report(self) -> dict[str, float]:
        """Reads the report of an iteration; exits if the process has ended."""
        line = self.report_stream.readline()
        if not line:
            last = "\n".join(self.log.read_text().splitlines()[-30:])
            raise SystemExit(f"{self.name} has ended early:\n{last}")
        report: dict[str, float] = json.loads(line)
        return report


def measure(sides: Sequence[Side], warm_up: int, iterations: int, limit_s: float) -> None:
    """Runs iterations of all sides in turn, with a different first side in each round.

    No round starts after `limit_s` seconds.
    """
    end = time.monotonic() + limit_s
    for number in range(warm_up + iterations):
        if time.monotonic() > end:
            break
        shift = number % len(sides)
        for side in (*sides[shift:], *sides[:shift]):
            side.iterate()
            print(f"  {number + 1}: {side.name} {side.seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    for side in sides:
        del side.seconds[:warm_up], side.reports[:warm_up]


def start(
    work: Workload, options: argparse.Namespace, engines: Sequence[str], folder: Path, exit_stack: ExitStack
) -> list[Side]:
    """Starts our side with each engine, then TRL's side; `exit_stack` stops the processes."""
    model = QUICKSTART if work.model == "quickstart" else options.model.resolve()
    if work.forced_length:
        model = remove_end_token(model, folder / "model")
    rounds = options.warm_up + options.iterations
    rows, ordered = make_rows(work, rounds * work.prompts, options.gsm8k, folder)
    job = Job(work, str(model), str(rows), rounds, options.threads, "", tuple(options.own))
    jobs = {f"ours, {engine}": (Path(sys.executable), replace(job, engine=engine)) for engine in engines}
    if options.trl_python:
        trl_job = replace(job, rows=str(ordered), engine="trl", options=tuple(options.trl))
        jobs["TRL"] = (options.trl_python.absolute(), trl_job)
    sides = []
    for name, (python, side_job) in jobs.items():
        sides.append(Side(name, python, side_job, folder))
        exit_stack.callback(sides[-1].process.kill)
    return sides


def run(work: Workload, options: argparse.Namespace, engines: Sequence[str]) -> None:
    """Measures one workload and prints the result."""
    with ExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
        sides = start(work, options, engines, folder, exit_stack)
        measure(sides, options.warm_up, options.iterations, options.limit)
        print(
            f"{work.name}: {work.prompts} x {work.repeats} x {work.max_tokens} tokens "
            f"({'forced' if work.forced_length else 'free'}), {work.model} model, {work.dtype}, {work.reward}, "
            f"{options.threads} threads, {len(sides[0].seconds)} iterations in turn after {options.warm_up}"
        )
        print(*(side.line() for side in sides), sep="\n", flush=True)
    for own in sides[:-1] if options.trl_python else []:
        other = sides[-1]
        pairs = [theirs / ours for ours, theirs in zip(own.seconds, other.seconds, strict=True)]
        tokens = [sum(report["tokens"] for report in side.reports) for side in (own, other)]
        token_ratio = sum(other.seconds) / tokens[1] / (sum(own.seconds) / tokens[0])
        print(f"  TRL over {own.name}: {format_spread(pairs)} pair by pair, {token_ratio:.3f} a token", flush=True)


def main() -> None:
    parser = make_parser(__doc__, iterations=8, warm_up=2, limit=600, threads=os.cpu_count() or 1)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--model", type=Path, help="folder of the model of all workloads but w1")
    parser.add_argument("--gsm8k", type=Path, help="file of GSM8K's rows, train.jsonl, for w3")
    parser.add_argument("--engine", choices=("both", "transformers", "vllm"), default="both")
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL")
    parser.add_argument("--trl", nargs="*", default=[], metavar="FIELD=JSON", help="of TRL's GRPOConfig")
    parser.add_argument("--own", nargs="*", default=[], metavar="KEY=VALUE", help="of our config")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {unknown.pop()!r}; there are {', '.join(WORKLOADS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the exit also stops both sides
    engines = [options.engine]
    if options.engine == "both":
        engines = [] if torch.cuda.is_available() else ["transformers"]
        engines += ["vllm"] if find_spec("vllm") else []
    print(describe_machine())
    for work in [WORKLOADS[name] for name in options.workloads or WORKLOADS]:
        if (work.model == "quickstart" or options.model) and (work.data != "gsm8k" or options.gsm8k):
            run(work, options, engines)
        else:
            print(f"{work.name}: left out, it needs --model" + (" and --gsm8k" if "w3" in work.name else ""))


if __name__ == "__main__":
    main()
