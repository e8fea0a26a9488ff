"""Folders of runs in the format that a run writes, made in no time: metrics, events, settings, ledger, summary."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from omegaconf import OmegaConf

from envs.example import Completion, Example
from envs.group import Group, SampledCompletion, Sampling, Times, Verdict
from torchgrpo.monitoring.ledger_line import Fate, TokenValues, record_of
from torchgrpo.monitoring.ledger_storage import close_file

BEGUN = 1_790_000_000.0
STEP_S = 4.0
"""Of which generation takes 2, judging 0.5, the optimizer 1, the push 0.3."""
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!-- <script> <img src=x onerror=alert(2)> -->",
    "\" ' & \\u003c ` ${alert(3)}",
    "\x00\x07\x1b[31m red \x7f",
    "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028 \u2029 \ufeff",
    "",
    "long " * 3000,
)
"""Completions that a page must show as the text that they are."""


@dataclass(frozen=True)
class Made:
    """What kind of run.

    steps: optimizer steps, of which each trains on `groups` groups of `repeats` completions of `tokens` tokens.
    evaluate: steps between evaluations of `problems` problems; 0: none. hostile: completions hold markup and worse.
    skill: what the reward rises to. prompts: of which training draws. engines: that draw groups in turn.
    """

    steps: int = 40
    groups: int = 4
    repeats: int = 4
    tokens: int = 12
    evaluate: int = 20
    problems: int = 12
    hostile: bool = False
    skill: float = 0.95
    prompts: int = 24
    engines: int = 2
    seed: int = 0


def make_run(folder: Path, made: Made, overrides: tuple[str, ...] = ("optimizer.lr=1e-4",)) -> Path:
    """Write the folder of such a run."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(made.seed)
    _write_settings(folder, overrides)
    _write_ledger(folder, made, generator)
    rows, events = [], [_event("begun", 0, BEGUN, overlapped=False, learner="GPU 0")]
    for step in range(made.steps + 1):
        if step:
            rows.append(_metrics(step, made, generator))
            events += _events_of_step(step)
        if made.evaluate and step % made.evaluate == 0:
            rows.append(_evaluation(step, made))
            events.append(_event("evaluated", step, _ended(step), after=step))
    events += [
        _event("alarm", made.steps // 2, _ended(made.steps // 2), rule="entropy", text="entropy is low"),
        _event("checkpoint", made.steps, _ended(made.steps), path="checkpoints/last"),
        _event("ended", made.steps, _ended(made.steps), outcome="finished"),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = {"outcome": "finished", "optimizer_steps": made.steps, "wall_time_s": made.steps * STEP_S}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _write_settings(folder: Path, overrides: tuple[str, ...]) -> None:
    from tests.scripts import configured

    config = configured(*overrides)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))


def _ended(step: int) -> float:
    return BEGUN + STEP_S * step


def _event(event: str, step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "optimizer_step": step, "iteration": step, **fields}


def _events_of_step(step: int) -> list[dict[str, Any]]:
    end = _ended(step)
    return [
        _event("phase", step, end - 1.3, name="collect", seconds=2.5),
        _event("phase", step, end - 0.3, name="optimize", seconds=1.0),
        _event("phase", step, end, name="push", seconds=0.3),
        _event("pushed", step, end, version=step),
    ]


def skill(step: int, made: Made) -> float:
    """Chance of a right answer after so many steps."""
    return 0.2 + (made.skill - 0.2) * (1 - float(np.exp(-4 * step / max(1, made.steps))))


def _metrics(step: int, made: Made, generator: np.random.Generator) -> dict[str, Any]:
    noise = generator.normal(0, 1, 8)
    reward = float(np.clip(skill(step, made) + 0.05 * noise[0], 0, 1))
    return {
        "optimizer_step": step,
        "reward/mean": reward,
        "reward/accuracy": reward,
        "reward/zero_variance_groups": max(0.0, reward - 0.2),
        "reward/errors": 0.0,
        "kl/ref": 0.002 * step + 0.01 * abs(noise[1]),
        "kl/inference": 1e-4 * abs(noise[2]),
        "ratio/mean": 1.0,
        "ratio/max": 1 + 0.2 * abs(noise[3]),
        "loss/clip_fraction_low": 0.01,
        "loss/clip_fraction_high": 0.02,
        "ess": 0.98,
        "mismatch/p99": 1e-3,
        "entropy": 0.5 * float(np.exp(-step / made.steps)),
        "length/response_mean": made.tokens + noise[4],
        "length/response_max": 2.0 * made.tokens,
        "length/truncated": 0.01,
        "loss/objective": -0.01 * noise[5],
        "grad_norm": float("inf") if step == 3 else 1 + abs(noise[6]),
        "lr": 1e-4,
        "advantage/mean": 0.0,
        "advantage/std": 0.9,
        "sample_utilization": 1.0,
        "age/mean": 0.4,
        "age/max": 1.0,
        "age/histogram/0": 10.0,
        "time/collect_s": 2.5,
        "time/optimize_s": 1.0,
        "time/push_s": 0.3,
        "idle/learner": 0.6,
        "throughput/tokens_per_s": 500 + 30 * noise[7],
        "time/elapsed_s": STEP_S * step,
        "tokens/total": float(made.groups * made.repeats * made.tokens * step),
        "time/unix_s": _ended(step),
    }


def _evaluation(step: int, made: Made) -> dict[str, Any]:
    value = skill(step, made)
    row: dict[str, Any] = {"optimizer_step": step, "iteration": step, "time/unix_s": _ended(step)}
    for name in ("pass@1", "avg@2", "score"):
        row |= {
            f"eval/sums/{name}": value,
            f"eval/sums/{name}_low": value - 0.05,
            f"eval/sums/{name}_high": value + 0.05,
        }
    return row | {
        "eval/sums/problems": float(made.problems),
        "eval/sums/length": 9.0,
        "eval/sums/truncated": 0.0,
    }


def _write_ledger(folder: Path, made: Made, generator: np.random.Generator) -> None:
    (folder / "rollouts").mkdir()
    path = folder / "rollouts" / "train_000001.jsonl"
    with path.open("wb") as file:
        for step in range(1, made.steps + 1):
            for place in range(made.groups):
                number = (step - 1) * made.groups + place
                file.write(
                    _line(_group(number, step, "", int(generator.integers(made.prompts)), made, generator))
                )
    close_file(path)
    for step in range(0, made.steps + 1, made.evaluate or made.steps + 1):
        if made.evaluate:
            path = folder / "rollouts" / f"eval_sums_{step:06d}.jsonl"
            numbers = range(made.problems)
            path.write_bytes(
                b"".join(_line(_group((1 << 39) + n, step, "sums", n, made, generator)) for n in numbers)
            )
            close_file(path)


def _line(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _group(
    number: int, step: int, evaluated: str, prompt: int, made: Made, generator: np.random.Generator
) -> dict[str, Any]:
    begun = _ended(step) - STEP_S
    right = (generator.random(made.repeats) < skill(step, made)).tolist()
    question = f"{prompt}+{prompt % 7}="
    system = "Add, please." if evaluated else "Add."
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    group = Group(
        number,
        Example(messages, str(prompt + prompt % 7), prompt),
        (5, 6, 7),
        question,
        Sampling(max_tokens=2 * made.tokens),
        [_completion(sample, one, step, number, made, generator) for sample, one in enumerate(right)],
        Times(begun, begun + 2.0, begun + 2.5),
    )
    if evaluated:
        return record_of(group, Fate("evaluated", step, evaluated=evaluated))
    tokens = sum(len(one.token_ids) for one in group.completions)
    log_ratio, entropy = generator.normal(0, 0.1, (2, tokens)).astype(np.float32)
    advantage = [1.0 if one else -0.5 for one in right]
    values = TokenValues(advantage, [True] * made.repeats, log_ratio, abs(entropy))
    return record_of(group, Fate("trained", step, "", [step], step - 1, values))


def _completion(
    sample: int, right: bool, step: int, number: int, made: Made, generator: np.random.Generator
) -> SampledCompletion:
    length = int(generator.integers(max(2, made.tokens - 4), made.tokens + 5))
    text = f"step {step} says {'right' if right else 'wrong'} " + "7+5=12 so it is " * (length // 5)
    if made.hostile:
        text = HOSTILE[(number + sample) % len(HOSTILE)]
    return SampledCompletion(
        generator.integers(8, 60, length).tolist(),
        (-abs(generator.normal(0, 0.1, length))).tolist(),
        [max(0, step - 1 - sample % 2)] * length,
        "stop" if sample else "length",
        text=text,
        shown=Completion(text, length, truncated=not sample),
        verdict=Verdict(float(right), {"accuracy": float(right)}, "scored", 0.01),
        engine=f"engine {number % made.engines} (CPU)",
    )
