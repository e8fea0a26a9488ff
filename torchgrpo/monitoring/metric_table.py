"""Table of every metric that a run writes: names and what they mean.

docs/metrics.md is made of it, the report shows it beside its curves, and the doctor takes from it which metrics are
parts of the reward. When to worry about a metric is in the doctor's rules (monitoring/doctor/rules.py).
"""

import re
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A line of the table: metrics that stand together, and their meaning in Markdown.

    names: K stands for any number; PART, MEMBER, LEVEL, SET and METRIC for any name.
    """

    names: tuple[str, ...]
    meaning: str


def _metric(names: str, meaning: str) -> Metric:
    return Metric(tuple(names.split()), meaning)


# fmt: off
METRICS = (
    _metric("reward/mean reward/std", "mean and standard deviation of the completions of this step"),
    _metric("reward/PART", "a component by name (`accuracy`, `format`), or one of several rewards"),
    _metric("reward/mean/MEMBER length/response_mean/MEMBER completions/MEMBER",
            "with `env.dataset=mixture`: reward, length and number of completions of each data set"),
    _metric("reward/zero_variance_groups", "share of groups whose rewards are all equal: they teach nothing"),
    _metric("reward/errors reward/invalid",
            "shares of completions that could not be judged: errors through bad data or a fault in a reward (left out "
            "of everything), invalid through the completion itself (scored the minimum)"),
    _metric("reward/invalid_gap",
            "by how much the mean score of the judged completions exceeds that of the invalid ones, in steps that "
            "have both"),
    _metric("reward/control_tokens",
            "share of completions that hold control tokens before their end, or ids of no token "
            "([rewards](rewards.md)); they are `invalid`"),
    _metric("reward/errors_total reward/invalid_total reward/workers_replaced",
            "errors and invalid completions since the start; reward processes that hung or died"),
    _metric("reward_latency/p50_s reward_latency/p95_s reward_latency/p99_s",
            "seconds that judging a completion took, of the last 1,000"),
    _metric("reward/length", "mean of what `policy.overlong_*` takes off the reward, where it is on"),
    _metric("advantage/mean advantage/std",
            "mean and deviation of the reward's advantage after group normalisation, of the completions in the loss"),
    _metric("distill/mean distill/size",
            "with `policy.distill_coef`: mean, and mean size, of what the teacher adds to the advantage of a token in "
            "the loss"),
    _metric("sample_utilization", "share of what was generated that is in the loss"),
    _metric("groups/success",
            "share of right answers among all that was generated: mean `accuracy`, or the share that scores 1 or more "
            "where a reward has no such part"),
    _metric("groups/duplicates",
            "completions that equal an earlier one of their group, over the most that there can be"),
    _metric("groups/repeats_question",
            "share of completions that hold their whole question, where that has 8 characters or more, blanks not "
            "counted"),
    _metric("prompts/repeated", "share of the groups of this batch whose prompt an earlier one of it has"),
    _metric("prompts/most_drawn",
            "how often the prompt drawn most was drawn among the last 2,000 groups, over the mean of all prompts "
            "there"),
    _metric("groups/generated", "groups generated for this batch, those that dynamic sampling replaced included"),
    _metric("prompts/left_out", "prompts longer than `env.max_prompt_tokens` so far"),
    _metric("curriculum/level curriculum/level/MEMBER",
            "with `env.curriculum.column`: the newest open level, 1 is the easiest ([curricula](curricula.md))"),
    _metric("curriculum/success/LEVEL curriculum/success/MEMBER curriculum/success/MEMBER/LEVEL",
            "recent success rate of a level, by its value, or of a data set, over the newest `env.curriculum.window` "
            "groups; every prompt counts alike, whichever are preferred"),
    _metric("curriculum/replay curriculum/solved curriculum/replay/MEMBER curriculum/solved/MEMBER",
            "with `env.curriculum.replay`: success rate of solved prompts that were asked again lately; prompts that "
            "were ever solved"),
    _metric("curriculum/weight/MEMBER",
            "with `env.curriculum.sources`: share of the next prompts that come from each data set"),
    _metric("kl/ref", "mean KL estimate to the reference model (k3)"),
    _metric("kl/teacher",
            "with `policy.distill_coef`, in place of `kl/ref`: the KL estimate to the teacher "
            "(`policy.kl_estimator`), which falls as the policy learns to speak as the teacher does "
            "([distillation](objectives.md#distillation))"),
    _metric("kl/inference", "mean KL estimate to the engine's own log-probs: staleness and numerical mismatch"),
    _metric("ratio/mean ratio/max", "the policy's probability of a token over the old policy's"),
    _metric("ess", "effective sample size of the importance ratios, 1 = on-policy"),
    _metric("mismatch/p50 mismatch/p99 mismatch/max",
            "abs(trainer log-prob - engine log-prob) of the tokens in the loss, before the update"),
    _metric("mismatch/gap mismatch/capped",
            "mean of abs(trainer log-prob - engine log-prob); share of tokens that `policy.mismatch` caps or masks"),
    _metric("loss/objective loss/kl loss/entropy loss/environment",
            "the terms of the loss, weighted; their sum is minimised"),
    _metric("loss/tokens_dropped",
            "share of tokens without a policy term, by `policy.trust_regions` or `policy.select_tokens`"),
    _metric("loss/entropy_coef", "the weight of the entropy that `policy.entropy_target` gave this step"),
    _metric("loss/clip_fraction_low loss/clip_fraction_high", "shares of tokens whose gradient the clip removes"),
    _metric("entropy", "entropy of the policy over the vocabulary, nats a token"),
    _metric("grad_norm lr", "norm of the gradient before clipping; learning rate"),
    _metric("loss/nonfinite_steps", "steps skipped for a NaN or infinite loss or gradient, so far"),
    _metric("length/response_mean length/response_max length/truncated",
            "tokens of a response, mean and longest; share of responses cut at the limit"),
    _metric("rollout/temperature", "temperature that the completions were drawn at"),
    _metric("turns/mean turns/drawn_tokens",
            "with `env.max_steps` above 1: turns of a completion, tokens of it that the model drew"),
    _metric("optimizer_step iteration policy_version",
            "number of the row; iteration of an evaluation; version of the weights that this step started from"),
    _metric("weight_check/mean weight_check/largest weight_check/seconds",
            "differences between engines and learner on fixed sequences, relative to 1 + the log-prob's size, and "
            "what the comparison took ([devices](devices.md#the-weight-check)); beyond its bounds the run stops"),
    _metric("age/mean age/max age/histogram/K", "versions between a token's weights and these; tokens of age K"),
    _metric("ess/age_K",
            "grpo_async.py: effective sample size of the ratios of these weights to those that drew the tokens, of "
            "age K alone, as the batch arrives; 1 where it has none"),
    _metric("groups/in_flight groups/ready groups/dropped_stale",
            "grpo_async.py: groups that are running, that wait, and that were too old so far"),
    _metric("idle/learner idle/engines",
            "shares of the time since the row before in which the learner waited for groups; in which no engine had "
            "anything to do. If `idle/learner` is larger, generation is the bottleneck; if `idle/engines` is larger, "
            "training is"),
    _metric("time/collect_s time/optimize_s time/push_s",
            "seconds of each phase since the row before; in grpo_async.py collect is what the learner waited"),
    _metric("time/elapsed_s tokens/total",
            "seconds of the run and response tokens trained on so far, those before a resume included"),
    _metric("time/unix_s", "when the row was written, in seconds since 1970"),
    _metric("throughput/padding",
            "positions that the learner's model computes, over the real tokens (each prompt once, and its responses): "
            "about 1 with `train.packing`, more with whole rows"),
    _metric("throughput/tokens_per_s throughput/completions_per_s",
            "trained on, over the wall clock since the row before"),
    _metric("eval/SET/METRIC",
            "pass@k, score and others of an evaluation set, with their intervals ([evaluation](evaluation.md))"),
)
# fmt: on
_EXACT = {name: metric for metric in METRICS for name in metric.names}


@cache
def pattern_of(name: str) -> str | None:
    """The name in the table that a logged metric goes by, or None."""
    if name in _EXACT:
        return name
    for pattern in _EXACT:
        expression = re.sub(r"[A-Z]{2,}", "[^/]+", re.sub(r"\bK$|(?<=_)K$", r"\\d+", pattern))
        if re.fullmatch(expression, name):
            return pattern
    return None


def meaning_of(name: str) -> str:
    """The meaning of a logged metric, without links and quotes; empty for one that is not in the table."""
    pattern = pattern_of(name)
    if pattern is None:
        return ""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", _EXACT[pattern].meaning).replace("`", "")
