"""Writes synthetic run folders: metrics, events, settings, ledger and summary."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from omegaconf import OmegaConf

from envs.example import Completion, Example
from envs.group import Group, GroupTimes, SampledCompletion, Sampling, Verdict
from tests.episodes import failed_episode, hostile_episode, rewritten_episode, tool_episode
from torchgrpo.monitoring.episode_metrics import episode_metrics
from torchgrpo.monitoring.ledger_record import GroupFate, TokenValues, group_to_record
from torchgrpo.monitoring.ledger_storage import close_file

START_TIME = 1_790_000_000.0
STEP_S = 4.0
"""Seconds of an optimizer step: 2 for generation, 0.5 for scoring, 1 for the optimizer, 0.3 for the push."""
HOSTILE_TEXTS = (
    "</script><script>alert(1)</script>",
    "<!-- <script> <img src=x onerror=alert(2)> -->",
    "\" ' & \\u003c ` ${alert(3)}",
    "\x00\x07\x1b[31m red \x7f",
    "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028 \u2029 \ufeff",
    "",
    "long " * 3000,
)
"""Completions with markup and control characters, which a page must show as text."""


EPISODES = (tool_episode, rewritten_episode, failed_episode, hostile_episode)


@dataclass(frozen=True)
class RunSpec:
    """Specification of a synthetic run.

    steps: optimizer steps; each trains on `groups` groups of `repeats` completions of about `tokens` tokens.
    evaluate: steps between evaluations of `problems` problems; 0: no evaluation. hostile: completions are
    `HOSTILE_TEXTS`. episodes: completions are `EPISODES`. skill: final mean reward. prompts: number of training
    prompts. engines: number of engines.
    """

    steps: int = 40
    groups: int = 4
    repeats: int = 4
    tokens: int = 12
    evaluate: int = 20
    problems: int = 12
    hostile: bool = False
    episodes: bool = False
    skill: float = 0.95
    prompts: int = 24
    engines: int = 2
    seed: int = 0


def write_run_folder(folder: Path, spec: RunSpec, overrides: tuple[str, ...] = ("optimizer.lr=1e-4",)) -> Path:
    """Writes the folder of a run with this specification and returns its path."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(spec.seed)
    _write_settings(folder, overrides)
    _write_ledger(folder, spec, generator)
    rows, events = [], [_event("start", 0, START_TIME, overlapped=False, learner="GPU 0")]
    for step in range(spec.steps + 1):
        if step:
            rows.append(_metrics(step, spec, generator))
            events += _events_of_step(step)
        if spec.evaluate and step % spec.evaluate == 0:
            rows.append(_evaluation(step, spec))
            events.append(_event("evaluation", step, _step_end_time(step), after=step))
    events += [
        _event("alarm", spec.steps // 2, _step_end_time(spec.steps // 2), rule="entropy", text="entropy is low"),
        _event("checkpoint", spec.steps, _step_end_time(spec.steps), path="checkpoints/last"),
        _event("end", spec.steps, _step_end_time(spec.steps), outcome="finished"),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    summary = {"outcome": "finished", "optimizer_steps": spec.steps, "wall_time_s": spec.steps * STEP_S}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _write_settings(folder: Path, overrides: tuple[str, ...]) -> None:
    from tests.script_runner import compose_run_config

    config = compose_run_config(*overrides)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))


def _step_end_time(step: int) -> float:
    return START_TIME + STEP_S * step


def _event(event: str, step: int, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": event, "time": time, "optimizer_step": step, "iteration": step, **fields}


def _events_of_step(step: int) -> list[dict[str, Any]]:
    end = _step_end_time(step)
    return [
        _event("phase", step, end - 1.3, name="collect", seconds=2.5),
        _event("phase", step, end - 0.3, name="optimize", seconds=1.0),
        _event("phase", step, end, name="push", seconds=0.3),
        _event("weight_push", step, end, version=step),
    ]


def success_rate(step: int, spec: RunSpec) -> float:
    """Returns the probability of a right completion after some optimizer steps."""
    return 0.2 + (spec.skill - 0.2) * (1 - float(np.exp(-4 * step / max(1, spec.steps))))


def _metrics(step: int, spec: RunSpec, generator: np.random.Generator) -> dict[str, Any]:
    noise = generator.normal(0, 1, 8)
    reward = float(np.clip(success_rate(step, spec) + 0.05 * noise[0], 0, 1))
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
        "logprob_diff/p99": 1e-3,
        "entropy": 0.5 * float(np.exp(-step / spec.steps)),
        "length/response_mean": spec.tokens + noise[4],
        "length/response_max": 2.0 * spec.tokens,
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
        **(episode_metrics([make() for make in EPISODES]) if spec.episodes else {}),
        "time/collect_s": 2.5,
        "time/optimize_s": 1.0,
        "time/push_s": 0.3,
        "idle/learner": 0.6,
        "throughput/tokens_per_s": 500 + 30 * noise[7],
        "time/elapsed_s": STEP_S * step,
        "tokens/total": float(spec.groups * spec.repeats * spec.tokens * step),
        "time/unix_s": _step_end_time(step),
    }


def _evaluation(step: int, spec: RunSpec) -> dict[str, Any]:
    value = success_rate(step, spec)
    row: dict[str, Any] = {"optimizer_step": step, "iteration": step, "time/unix_s": _step_end_time(step)}
    for name in ("pass@1", "avg@2", "score"):
        row |= {
            f"eval/sums/{name}": value,
            f"eval/sums/{name}_low": value - 0.05,
            f"eval/sums/{name}_high": value + 0.05,
        }
    return row | {"eval/sums/problems": float(spec.problems), "eval/sums/length": 9.0, "eval/sums/truncated": 0.0}


def _write_ledger(folder: Path, spec: RunSpec, generator: np.random.Generator) -> None:
    (folder / "rollouts").mkdir()
    path = folder / "rollouts" / "train_000001.jsonl"
    with path.open("wb") as file:
        for step in range(1, spec.steps + 1):
            for index in range(spec.groups):
                number = (step - 1) * spec.groups + index
                file.write(_line(_group(number, step, "", int(generator.integers(spec.prompts)), spec, generator)))
    close_file(path)
    for step in range(0, spec.steps + 1, spec.evaluate or spec.steps + 1):
        if spec.evaluate:
            path = folder / "rollouts" / f"eval_sums_{step:06d}.jsonl"
            numbers = range(spec.problems)
            path.write_bytes(b"".join(_line(_group((1 << 39) + n, step, "sums", n, spec, generator)) for n in numbers))
            close_file(path)


def _line(record: dict[str, Any]) -> bytes:
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _group(
    number: int, step: int, eval_set: str, prompt: int, spec: RunSpec, generator: np.random.Generator
) -> dict[str, Any]:
    start = _step_end_time(step) - STEP_S
    is_right = (generator.random(spec.repeats) < success_rate(step, spec)).tolist()
    question = f"{prompt}+{prompt % 7}="
    system = "Add, please." if eval_set else "Add."
    messages = ({"role": "system", "content": system}, {"role": "user", "content": question})
    group = Group(
        number,
        Example(messages, str(prompt + prompt % 7), prompt),
        (5, 6, 7),
        question,
        Sampling(max_tokens=2 * spec.tokens),
        [_completion(sample, one, step, number, spec, generator) for sample, one in enumerate(is_right)],
        GroupTimes(start, start + 2.0, start + 2.5),
    )
    if eval_set:
        return group_to_record(group, GroupFate("evaluated", step, eval_set=eval_set))
    tokens = sum(len(one.token_ids) for one in group.completions)
    log_ratio, entropy = generator.normal(0, 0.1, (2, tokens)).astype(np.float32)
    advantage = [1.0 if one else -0.5 for one in is_right]
    values = TokenValues(advantage, [True] * spec.repeats, log_ratio, abs(entropy))
    return group_to_record(group, GroupFate("trained", step, "", [step], step - 1, values))


def _completion(
    sample: int, is_right: bool, step: int, number: int, spec: RunSpec, generator: np.random.Generator
) -> SampledCompletion:
    if spec.episodes:
        return EPISODES[sample % len(EPISODES)]()
    length = int(generator.integers(max(2, spec.tokens - 4), spec.tokens + 5))
    text = f"step {step} says {'right' if is_right else 'wrong'} " + "7+5=12 so it is " * (length // 5)
    if spec.hostile:
        text = HOSTILE_TEXTS[(number + sample) % len(HOSTILE_TEXTS)]
    return SampledCompletion(
        generator.integers(8, 60, length).tolist(),
        (-abs(generator.normal(0, 0.1, length))).tolist(),
        [max(0, step - 1 - sample % 2)] * length,
        "stop" if sample else "length",
        text=text,
        reward_input=Completion(text, length, truncated=not sample),
        verdict=Verdict(float(is_right), {"accuracy": float(is_right)}, "scored", 0.01),
        engine=f"engine {number % spec.engines} (CPU)",
    )
