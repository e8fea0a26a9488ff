"""An iteration of grpo.py beside one of TRL's GRPOTrainer: same model, prompts, lengths, dtype, threads, in turn.

    python benchmarks/peer_trl.py [w1 w2 ...] [--model FOLDER] [--gsm8k FILE] [--engine both|transformers|vllm]

Either side lives in a process of its own and does one iteration (generate, score, one AdamW step, push) while the
other sleeps, so that noise meets both; seconds are this process's, from the leave to go on to the next request for it.
Seconds of CPU are told beside them: with `--threads 1` these hardly feel what else the machine does.
The environment of TRL is made on first use (pip, in `.cache/trl` of the checkout): with the torch and transformers of
this one. Workloads are in peer_work.py: w1 is the quickstart's model; w2 a given one with forced lengths, w2-bf16 the
same in bfloat16; w3-right GSM8K with natural ends judged right or wrong, w3-dense the same with a reward that differs
among all completions. Without `--model` only w1 runs, without `--gsm8k` no w3.

Forced lengths: both read a copy of the model's folder whose end token has a number that the model's head does not
have, so that nothing is forced step by step. bfloat16: weights and arithmetic on both sides; ours with `model.dtype`,
`inference_model.dtype` and `train.mixed_precision` (the optimizer keeps the bits that rounding drops), TRL's with
`dtype=bfloat16` and `bf16=True` (it does not).

TRL's settings: one generation an optimizer step, hence no pass for old log-probs; beta=0, so no reference;
gradient_checkpointing=False (its default costs a third more); its default optimizer (fused AdamW) and chunked head;
no logging, no saving; one microbatch where it fits in a few GB, else the largest that was no slower for it
(`Workload.microbatch`), and ours as large. `--trl FIELD=JSON` tries others: on a CPU a static cache and torch_compile
change nothing, and continuous batching is twenty times slower. On GPUs it can generate by vLLM too, in an environment
that has one it knows (1.16: up to 0.31): `--environment FOLDER --trl use_vllm=true`.
Ours: the defaults of a run, with its ledger, metrics, doctor and weight check. Engines: both kinds on a CPU,
vLLM alone on a GPU, which learner and engine share.
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
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402

from benchmarks.peer_work import SEED, WORKLOADS, Job, Workload  # noqa: E402
from config.env import EnvConfig  # noqa: E402
from envs.prompts import PromptSource  # noqa: E402
from envs.task import Example, make_task  # noqa: E402

TRL = "trl==1.16.0"
SAME = ("transformers", "accelerate", "datasets")
"""Packages that both sides have in one version."""
OWN_SIDE, TRL_SIDE = (ROOT / "benchmarks" / f"peer_{name}_side.py" for name in ("own", "trl"))


# -- TRL's environment


def trl_python(folder: Path) -> Path:
    """The interpreter of an environment with TRL in it, which is made where it is missing.

    Raises:
        SystemExit: pip could not install it; says what it said last.
    """
    python = folder / "bin" / "python"
    build = version("torch")
    wanted = [TRL, *(f"{name}=={version(name)}" for name in SAME)]
    done = folder / "installed.json"
    if done.is_file() and json.loads(done.read_text()) == [build, *wanted]:
        return python
    print(f"installing {TRL} into {folder} (a minute or two, once)", flush=True)
    _made(folder, [sys.executable, "-m", "venv", str(folder)])
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # An index may offer this very build, such as 2.13.0+cpu, or only the version's common one.
    builds = dict.fromkeys((build, build.partition("+")[0]))
    _made(folder, *([*install, f"torch=={each}"] for each in builds))
    _made(folder, [*install, *wanted])
    done.write_text(json.dumps([build, *wanted]))
    return python


def _made(folder: Path, *commands: Sequence[str]) -> None:
    """Runs the first command that works."""
    for command in commands:
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode == 0:
            return
    said = "\n".join((ended.stderr or ended.stdout).strip().splitlines()[-5:])
    raise SystemExit(
        f"TRL's environment could not be made in {folder}:\n  {' '.join(command)}\n{said}\n"
        "It needs a package index that pip reaches; --environment FOLDER names one that has been made elsewhere."
    )


# -- what is trained on


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


# -- the two sides, in turn


@dataclass
class Side:
    """A process that does one iteration at a time. seconds, said: of each; what it said goes to `log`."""

    name: str
    process: subprocess.Popen[str]
    reports: Any
    log: Path
    seconds: list[float] = field(default_factory=list)
    said: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, python: Path, script: Path, job: Job, folder: Path) -> "Side":
        """Returns when it is ready to begin."""
        told, log = folder / f"{name}.json", folder / f"{name}.log"
        job.write(told)
        read, written = os.pipe()
        threads = {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(python), str(script), str(told), str(written)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(written,),
                text=True,
                cwd=ROOT,
                env=os.environ | threads,
            )
        os.close(written)
        side = cls(name, process, os.fdopen(read), log)
        side._listen()
        return side

    def iterate(self) -> None:
        assert self.process.stdin is not None
        began = time.perf_counter()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self._listen()
        self.seconds.append(time.perf_counter() - began)
        self.said.append(said)

    def end(self) -> str:
        """There is no more to do; what it printed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        return self.log.read_text()

    def peak_gib(self) -> float:
        """Most resident memory that the process has had, and what its own children hold now (their share of pages)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        children = psutil.Process(self.process.pid).children(recursive=True)
        return (peak + sum(child.memory_full_info().pss for child in children)) / 2**30

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


# -- what is reported


STAGES = {
    "ours": ("collect", "optimize", "push", "weight check", "ledger"),
    "TRL": ("generate", "score", "step"),
}
"""Seconds that a side tells of. The check is part of the push; TRL's step holds generate and score, but not AdamW."""


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def ratio_line(own: Side, other: Side) -> str:
    """Seconds of one over those of the other, below 1 where the first is faster."""
    pairs = [a / b for a, b in zip(own.seconds, other.seconds, strict=True)]
    medians = statistics.median(own.seconds) / statistics.median(other.seconds)
    cpu = [a["cpu"] / b["cpu"] for a, b in zip(own.said, other.said, strict=True)]
    names = f"{own.name} / {other.name}"
    return f"  ratio {names}: {medians:.3f} of medians, pairwise {spread(pairs)}; of CPU {spread(cpu)}"


def side_line(side: Side, peak: float) -> str:
    """What a side's iterations took and what they made."""

    def median(key: str) -> float:
        return statistics.median(said.get(key, 0.0) for said in side.said)

    stages = STAGES["TRL" if side.name == "TRL" else "ours"]
    split = ", ".join(f"{stage} {median(stage):.3f}" for stage in stages)
    gpu = f" + {median('gpu_gib'):.2f} on the GPU" if "gpu_gib" in side.said[0] else ""
    return (
        f"  {side.name:<18} {spread(side.seconds)} s   {median('tokens'):.0f} tokens after "
        f"{median('prompt_tokens'):.0f} of prompts, reward {median('reward'):.3f}, peak {peak:.2f} GiB{gpu}\n"
        f"  {'':<18} {split}; {median('cpu'):.3f} s of CPU"
    )


def per_token_line(own: Side, other: Side) -> str:
    """The ratio of seconds a token, where lengths are free and so differ between the two."""
    each = [sum(side.seconds) / sum(said["tokens"] for said in side.said) * 1000 for side in (own, other)]
    return f"  ratio of ms a token: {each[0]:.2f} / {each[1]:.2f} = {each[0] / each[1]:.3f}"


def start(
    work: Workload,
    asked: argparse.Namespace,
    python: Path,
    engines: Sequence[str],
    folder: Path,
    ending: ExitStack,
) -> list[Side]:
    """Ours by each engine, then TRL but for a profile; `ending` stops them."""
    model = ROOT / "models" / "quickstart" if work.model == "quickstart" else asked.model.resolve()
    if work.forced:
        model = never_ending(model, folder / "model")
    rounds = asked.warm_up + asked.iterations
    rows, drawn = make_rows(work, rounds * work.prompts, asked.gsm8k, folder)
    job = Job(
        work, str(model), str(rows), rounds, asked.threads, options=tuple(asked.own), profile=asked.profile
    )
    sides = []
    for engine in engines:
        own = replace(job, engine=engine)
        sides.append(Side.start(f"ours, {engine}", Path(sys.executable), OWN_SIDE, own, folder))
        ending.callback(sides[-1].process.kill)
    if not asked.profile:
        theirs = replace(job, rows=str(drawn), options=tuple(asked.trl))
        sides.append(Side.start("TRL", python, TRL_SIDE, theirs, folder))
        ending.callback(sides[-1].process.kill)
    return sides


def run(work: Workload, asked: argparse.Namespace, python: Path, engines: Sequence[str]) -> None:
    """Measures one workload and prints it."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        sides = start(work, asked, python, engines, folder, ending)
        measure(sides, asked.warm_up, asked.iterations, asked.limit)
        peaks = [side.peak_gib() for side in sides]
        printed = [side.end() for side in sides]
    lengths = "forced" if work.forced else "free"
    print(
        f"{work.name}: {work.prompts} x {work.repeats} x {work.max_tokens} tokens ({lengths}), {work.model} model, "
        f"{work.dtype}, {work.reward}, {asked.threads} threads, {len(sides[0].seconds)} iterations in turn after "
        f"{asked.warm_up}; median [least, most]"
    )
    for side, peak in zip(sides, peaks, strict=True):
        print(side_line(side, peak))
    if asked.profile:
        print(*printed, sep="\n")
        return
    *own, other = sides
    for side in own:
        print(ratio_line(side, other))
        if not work.forced:
            print(per_token_line(side, other))
    print(next(line for line in printed[-1].splitlines() if line.startswith("  TRL ")), flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--model", type=Path, help="folder of the model of all workloads but w1")
    parser.add_argument("--gsm8k", type=Path, help="file of GSM8K's rows, train.jsonl, for w3")
    parser.add_argument("--engine", choices=("both", "transformers", "vllm"), default="both")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds, after which no iteration begins")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--environment", type=Path, default=ROOT / ".cache" / "trl", help="of TRL")
    parser.add_argument("--profile", action="store_true", help="where our time goes; without TRL")
    parser.add_argument("--trl", nargs="*", default=[], metavar="FIELD=JSON", help="of TRL's GRPOConfig")
    parser.add_argument("--own", nargs="*", default=[], metavar="KEY=VALUE", help="of our config")
    asked = parser.parse_args()
    unknown = [name for name in asked.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    return asked


def possible(work: Workload, asked: argparse.Namespace) -> bool:
    """Whether what the workload needs has been given."""
    return (work.model == "quickstart" or asked.model) and (work.data != "gsm8k" or asked.gsm8k)


def main() -> None:
    asked = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that both sides are stopped too
    engines = [asked.engine]
    if asked.engine == "both":
        engines = [] if torch.cuda.is_available() else ["transformers"]
        engines += ["vllm"] if find_spec("vllm") else []
    python = Path(sys.executable) if asked.profile else trl_python(asked.environment)
    for name in asked.workloads or WORKLOADS:
        if possible(WORKLOADS[name], asked):
            run(WORKLOADS[name], asked, python, engines)
        else:
            print(f"{name}: left out, it needs --model" + (" and --gsm8k" if "w3" in name else ""))


if __name__ == "__main__":
    main()
