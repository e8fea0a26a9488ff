"""Optimizer steps that taught nothing: that there were some, why, and what helps."""

import math
from collections.abc import Sequence

from config.schema import Config
from monitoring.doctor.history import History, Row, mean
from monitoring.doctor.rule import Rule, Seen

IDLE_STEPS = 5
"""Steps in a row that taught nothing, after which the run says so."""
_METRICS = ("reward/zero_variance_groups", "advantage/std", "grad_norm")


def taught_nothing(history: History) -> Seen | None:
    return None if history.solved else _idle(history)


def nothing_left(history: History) -> Seen | None:
    return _idle(history) if history.solved else None


def _idle(history: History) -> Seen | None:
    count = len(history.idle)
    if count < IDLE_STEPS:
        return None
    why, helps = explanation(list(history.idle), history.config)
    return Seen(f"optimizer steps {history.step - count + 1} to {history.step} taught nothing", why, helps)


def explanation(rows: Sequence[Row], config: Config) -> tuple[str, str]:
    """Why these steps taught nothing, in figures, and what helps."""

    def share(name: str) -> float:
        return mean([row.get(name, 0.0) for row in rows])

    found: list[str] = []
    helps: list[str] = []
    if share("reward/errors") >= 0.5:
        found.append(f"{share('reward/errors'):.0%} of the answers could not be judged")
        helps.append("mend the reward (run=rewards tries it on saved answers)")
    from_rewards = not config.policy.teaches_equal_rewards
    if from_rewards and share("reward/zero_variance_groups") >= 1:
        reward = share("reward/mean")
        found.append(f"all {config.optim_batch_groups} groups had equal rewards (mean {reward:.2f})")
    if share("reward/invalid") >= 0.5:
        found.append(f"{share('reward/invalid'):.0%} of the answers were invalid")
        helps.append("see what the model writes in the printed samples")
    if share("length/truncated") >= 0.5:
        limit = config.inference_model.max_tokens
        found.append(f"{share('length/truncated'):.0%} of the answers were cut at {limit} tokens")
        helps.append("raise inference_model.max_tokens")
    if share("sample_utilization") == 0:
        found.append("no answer was in the loss")
        if config.policy.filter_range is not None:
            helps.append(f"widen policy.filter_range={config.policy.filter_range}")
        if config.policy.filter_truncated:
            helps.append("set policy.filter_truncated=false")
    if not all(math.isfinite(row["grad_norm"]) for row in rows):
        found.append("gradients were not finite")
        helps.append("lower optimizer.lr")
    if config.policy.distill_coef != 0 and share("sample_utilization") > 0 and share("kl/teacher") == 0:
        found.append("the teacher finds every token as likely as the policy does")
        helps.append("another teacher (ref_model.name), or one that sees the answer (policy=opsd)")
    if from_rewards and any(row["grad_norm"] > 0 for row in rows) and config.policy.kl_coef > 0:
        found.append("only the KL to the reference moved the weights")
    if from_rewards and share("reward/zero_variance_groups") >= 1 and share("reward/errors") < 0.5:
        if mean([row.get("reward/accuracy", row["reward/mean"]) for row in rows]) >= 1:
            helps.append("harder prompts: every answer is right")
        else:
            helps.append("compare the printed samples with what the reward asks for")
            helps.append(
                "take easier prompts, a larger env.repeats, or a reward with more steps between 0 and 1"
            )
    why = ", ".join(found) or "the gradient was zero"
    return f"{why[0].upper()}{why[1:]}", "; ".join(helps) or "look at grad_norm and lr"


IDLE = (
    Rule(
        "nothing_taught",
        "alarm",
        _METRICS,
        f"{IDLE_STEPS} optimizer steps in a row had no gradient that came from rewards or a teacher",
        "All groups had equal rewards, or nothing could be judged, or nothing was in the loss: the finding says which",
        "what the finding names: the reward, the prompts, `inference_model.max_tokens`, `policy.filter_range`",
        taught_nothing,
    ),
    Rule(
        "nothing_left",
        "info",
        _METRICS,
        "the same after the task was solved",
        "Every answer is right: there is nothing left to learn from these prompts",
        "harder prompts, or a shorter `train.total_dialog_turns`",
        nothing_left,
    ),
)
