"""What both sides of `peer_trl.py` do alike: workloads, rewards, and taking turns. Nothing but the standard library."""

import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """What one iteration of either side is.

    prompts, repeats: groups of an iteration, completions of a group. max_tokens: of a completion.
    forced: no token ends a completion, so that all are as long as they may be. dtype: of weights and arithmetic.
    model: `quickstart`, or `given` (by `--model`). data: `sums`, `stories` or `gsm8k`. reward: a function of this file.
    microbatch: completions of a microbatch, on both sides.
    """

    name: str
    model: str
    prompts: int
    repeats: int
    max_tokens: int
    forced: bool
    dtype: str
    data: str
    reward: str
    microbatch: int

    @property
    def completions(self) -> int:
        """Of one iteration, which is one optimizer step."""
        return self.prompts * self.repeats


W1 = Workload("w1", "quickstart", 16, 8, 32, True, "float32", "sums", "share_of_even", 128)
W2 = Workload("w2", "given", 4, 4, 48, True, "float32", "stories", "share_of_even", 16)
W3 = Workload("w3-right", "given", 4, 8, 192, False, "float32", "gsm8k", "right_number", 8)
WORKLOADS = {
    work.name: work
    for work in (
        W1,
        W2,
        replace(W2, name="w2-bf16", dtype="bfloat16"),
        W3,
        replace(W3, name="w3-dense", reward="share_of_even"),
        replace(W3, name="w3-dense-bf16", reward="share_of_even", dtype="bfloat16"),
    )
}
"""`w3-right` judges as a run does; a small model gets nearly every group all wrong, and a trainer may spare itself what
has no gradient. `w3-dense` differs in the reward alone, which no two completions of a group share."""

LEARNING_RATE, BETAS, SEED = 1e-6, (0.9, 0.95), 0


@dataclass(frozen=True)
class Job:
    """What a side is told: a workload, and where and how it runs.

    model: a folder in Hugging Face format. rows: JSONL of "messages" and "answer", in the order of training for TRL and
    as a data set for ours, whose order with SEED is that one. rounds: iterations. engine: of ours.
    options: fields of TRL's `GRPOConfig`, or overrides of ours. profile: print where the time of each stage goes.
    """

    work: Workload
    model: str
    rows: str
    rounds: int
    threads: int
    engine: str = "transformers"
    options: tuple[str, ...] = ()
    profile: bool = False

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        return cls(**fields | {"work": Workload(**fields["work"]), "options": tuple(fields["options"])})


class Turns:
    """A side's end of the pipes to `peer_trl.py`: it works only between two waits.

    Args:
        descriptor: file descriptor that JSON lines go to; a line of standard input is the leave to go on.
    """

    def __init__(self, descriptor: int) -> None:
        self.told = os.fdopen(descriptor, "w")
        self.began = time.process_time()
        self.waited = 0.0

    def clock(self) -> float:
        """Seconds, without those in which the other side was at work."""
        return time.perf_counter() - self.waited

    def wait(self, **said: Any) -> bool:
        """Tells what the work since the last wait has been and sleeps until it is this side's turn; False: no more.

        Beside what is said: `cpu`, the seconds of all threads of this process.
        """
        self.told.write(json.dumps(said | {"cpu": time.process_time() - self.began}) + "\n")
        self.told.flush()
        asleep = time.perf_counter()
        go_on = bool(sys.stdin.readline())
        self.waited += time.perf_counter() - asleep
        self.began = time.process_time()
        return go_on


def right_number(text: str, answer: str) -> float:
    """1.0 where the last number of a completion is the answer, else 0.0."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(bool(found) and found[-1].replace(",", "").removesuffix(".0") == answer.replace(",", ""))


def share_of_even(text: str, answer: str) -> float:
    """Share of the characters with an even code: it differs among completions, whatever a model writes."""
    return sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1)


REWARDS = {"right_number": right_number, "share_of_even": share_of_even}


def judged_right_number(completion: Any, example: Any) -> float:
    """`right_number` as `env.reward` takes it."""
    return right_number(completion.text, example.answer)


def judged_share_of_even(completion: Any, example: Any) -> float:
    """`share_of_even` as `env.reward` takes it."""
    return share_of_even(completion.text, example.answer)
