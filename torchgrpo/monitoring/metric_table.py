"""Table of all metrics that a run writes, with their meanings.

`python -m tests.reference --write` generates docs/metrics.md from the table. The report shows the meanings
beside its curves. The diagnostics match logged names to the names in the table; the bounds of their rules are
in monitoring/diagnostics/rules.py.
"""

import re
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """Line of the table: related metrics and their meaning in Markdown.

    names: K stands for any number; COMPONENT, MEMBER, LEVEL, SET and METRIC stand for any name.
    """

    names: tuple[str, ...]
    meaning: str


def _metric(names: str, meaning: str) -> Metric:
    return Metric(tuple(names.split()), meaning)


# fmt: off
METRICS = (
    _metric("reward/mean reward/std", "Mean and standard deviation of the rewards of all completions in this step"),
    _metric("reward/COMPONENT", "Mean of one reward component (`accuracy`, `format`), or of one of several rewards"),
    _metric("reward/mean/MEMBER length/response_mean/MEMBER completions/MEMBER",
            "Mean reward, mean length and number of completions of each data set of a mixture (`env.dataset=mixture`)"),
    _metric("reward/zero_variance_groups", "Share of groups with equal rewards; these groups have no gradient"),
    _metric("reward/errors reward/invalid",
            "Shares of completions without a score. Errors come from the data or the reward and are left out of "
            "training and means. Invalid completions are the model's fault and get the minimum reward"),
    _metric("reward/invalid_gap",
            "Mean reward of scored completions minus mean reward of invalid ones, in steps that have both"),
    _metric("reward/control_tokens",
            "Share of completions with control tokens before their end, or with ids of no token "
            "([rewards](rewards.md)). They are invalid"),
    _metric("reward/errors_total reward/invalid_total reward/workers_replaced",
            "Errors, invalid completions and replaced reward processes (hung or crashed) since the start"),
    _metric("reward_latency/p50_s reward_latency/p95_s reward_latency/p99_s",
            "Percentiles of the seconds to score a completion, over the last 1,000 completions"),
    _metric("endpoint/requests endpoint/refused endpoint/overhead_s",
            "Requests of agents since the last row, refused ones among them, and the mean seconds that a request spent "
            "outside the engine"),
    _metric("judge/requests judge/retries judge/cached judge/seconds",
            "With `env.reward=judge`: requests and retries since the start, completions whose grade was known, and "
            "median seconds of the last 1,000 requests"),
    _metric("reward_model/rows reward_model/batch_size reward_model/seconds",
            "With `env.reward=reward_model`: completions scored since the start, and mean size and median seconds of "
            "the last 1,000 batches"),
    _metric("reward/overlong_penalty", "Mean penalty of `policy.overlong_*`, a number below or equal to 0"),
    _metric("advantage/mean advantage/std",
            "Mean and standard deviation of the reward's advantages after group normalization, for completions in the "
            "loss"),
    _metric("distill/mean distill/abs_mean",
            "Mean and mean absolute value of the teacher's term in the token advantages (`policy.distill_coef`)"),
    _metric("sample_utilization", "Share of the generated completions that are in the loss"),
    _metric("groups/success",
            "Success rate of all generated completions: mean `accuracy`, or the share of rewards of at least 1 if the "
            "reward has no such component"),
    _metric("groups/duplicates",
            "Number of completions that equal an earlier one of their group, divided by the maximum number"),
    _metric("completions/prompt_echo",
            "Share of completions that contain their whole question, if it has at least 8 non-blank characters"),
    _metric("prompts/duplicates", "Share of groups whose prompt also belongs to an earlier group of the batch"),
    _metric("prompts/max_repeat_ratio",
            "Number of occurrences of the most frequent prompt among the last 2,000 groups, divided by the mean over "
            "all prompts there"),
    _metric("groups/generated", "Number of groups generated for this batch, including groups that were replaced"),
    _metric("prompts/too_long", "Number of prompts longer than `env.max_prompt_tokens` so far"),
    _metric("curriculum/level curriculum/level/MEMBER",
            "Newest open level, 1 is the easiest, with `env.curriculum.column` ([curricula](curricula.md))"),
    _metric("curriculum/success/LEVEL curriculum/success/MEMBER curriculum/success/MEMBER/LEVEL",
            "Success rate of a level or a data set over the newest `env.curriculum.window` groups. Each prompt has the "
            "same weight, regardless of its sampling probability"),
    _metric("curriculum/replay curriculum/solved curriculum/replay/MEMBER curriculum/solved/MEMBER",
            "Success rate of solved prompts that were sampled again, and number of solved prompts, with "
            "`env.curriculum.replay`"),
    _metric("curriculum/weight/MEMBER",
            "Share of the next prompts that come from each data set, with `env.curriculum.sources`"),
    _metric("kl/ref", "Mean KL estimate to the reference model (k3)"),
    _metric("kl/teacher",
            "Mean KL estimate to the teacher, in place of `kl/ref`, with `policy.distill_coef` "
            "([distillation](objectives.md#distillation))"),
    _metric("kl/inference",
            "Mean KL estimate to the engine's log-probs: staleness and numerical differences"),
    _metric("ratio/mean ratio/max", "Mean and maximum of the importance ratio: token probability of the policy over "
            "that of the old policy"),
    _metric("ess", "Effective sample size of the importance ratios; 1 is on-policy"),
    _metric("logprob_diff/p50 logprob_diff/p99 logprob_diff/max",
            "Percentiles and maximum of abs(trainer log-prob - engine log-prob) for tokens in the loss, before the "
            "update"),
    _metric("logprob_diff/mean mismatch/capped",
            "Mean of abs(trainer log-prob - engine log-prob), and share of tokens that `policy.mismatch` caps or "
            "masks"),
    _metric("loss/objective loss/kl loss/entropy loss/env_token_nll",
            "Weighted terms of the loss; the optimizer minimizes their sum"),
    _metric("loss/masked_fraction",
            "Share of tokens without a policy term, because of `policy.trust_regions` or `policy.select_tokens`"),
    _metric("loss/entropy_coef", "Entropy coefficient of this step, set by `policy.entropy_target`"),
    _metric("loss/clip_fraction_low loss/clip_fraction_high",
            "Shares of tokens whose gradient the lower and the upper clip bound removes"),
    _metric("entropy", "Mean entropy of the policy's next-token distribution, in nats per token"),
    _metric("grad_norm lr", "Norm of the gradient before clipping, and learning rate"),
    _metric("loss/nonfinite_steps", "Number of skipped steps with a NaN or infinite loss or gradient so far"),
    _metric("length/response_mean length/response_max length/truncated",
            "Mean and maximum number of tokens of a response, and share of responses truncated at the token limit"),
    _metric("rollout/temperature", "Mean sampling temperature of the completions"),
    _metric("turns/mean turns/sampled_tokens",
            "Mean number of turns, and of sampled tokens, of a completion with several turns"),
    _metric("turns/max agent/sequences",
            "Maximum number of turns, and mean number of token sequences, of an episode. A further sequence begins "
            "where the chat template or the environment rewrites earlier messages"),
    _metric("agent/end/stop agent/end/length agent/end/turns agent/end/deadline agent/end/error",
            "Shares of episodes ended by model, environment or agent, by a token limit, by the limit of turns, by "
            "the deadline, and by a failure"),
    _metric("agent/seconds/start_p50 agent/seconds/start_p95",
            "Percentiles of the seconds before the first turn of an episode: the reset of its environment, or the "
            "start of its agent"),
    _metric("agent/seconds/engine_p50 agent/seconds/engine_p95 agent/seconds/environment_p50 "
            "agent/seconds/environment_p95",
            "Percentiles of the seconds that engine and environment took for all turns of an episode"),
    _metric("reward/turn/K",
            "Mean reward of turn K, up to turn 8, over the episodes with such a turn; 0 if the environment gives no "
            "rewards of turns"),
    _metric("tools/calls", "Mean number of tool calls of an episode, in steps with calls"),
    _metric("tools/errors tools/malformed tools/unknown tools/timeouts",
            "Shares of the calls in which the tool failed, that could not be parsed, whose tool does not exist, and "
            "that reached the time limit"),
    _metric("episodes/alive", "Number of unfinished episodes when the row was written"),
    _metric("optimizer_step iteration policy_version",
            "Number of the optimizer step, iteration of an evaluation, and version of the weights before the step"),
    _metric("weight_check/mean weight_check/max weight_check/seconds",
            "Mean and maximum log-prob difference between engines and learner on fixed sequences, relative to 1 + the "
            "absolute log-prob, and seconds of the comparison ([devices](devices.md#the-weight-check)). Beyond its "
            "bounds the run stops"),
    _metric("age/mean age/max age/histogram/K",
            "Mean and maximum age of the tokens in the loss, in policy versions, and number of tokens of age K"),
    _metric("ess/age_K",
            "grpo_async.py: effective sample size of the importance ratios of tokens of age K before training on the "
            "batch; 1 without such tokens"),
    _metric("groups/in_flight groups/ready groups/dropped_stale",
            "grpo_async.py: number of groups in generation, number of waiting groups, and number of groups dropped as "
            "too old so far"),
    _metric("idle/learner idle/engines",
            "Shares of the time since the previous row in which the learner waited for groups, and in which all "
            "engines were idle. `idle/learner` is larger if generation is the bottleneck, `idle/engines` if training "
            "is"),
    _metric("time/collect_s time/optimize_s time/push_s",
            "Seconds of each phase since the previous row; in grpo_async.py, collect is the learner's waiting time"),
    _metric("time/elapsed_s tokens/total",
            "Seconds of the run and number of trained response tokens so far, including the time before a resume"),
    _metric("time/unix_s", "Time at which the row was written, in seconds since 1970"),
    _metric("throughput/padding",
            "Number of token positions that the learner computes, divided by the number of real tokens (each prompt "
            "once, plus its responses): about 1 with `train.packing`, more with padded rows"),
    _metric("throughput/learner_tokens_per_s",
            "Real tokens per second of an optimizer step, each prompt counted once"),
    _metric("throughput/learner_mfu",
            "Share of `machine.gpu_tflops` of the learner's GPUs that useful operations take in an optimizer step "
            "([MFU](gpu.md#mfu)); microbatches without a gradient count their forward pass. On GPUs only"),
    _metric("memory/learner_peak_gib",
            "Most GPU memory that PyTorch had allocated in a learner process since the previous step, the largest of "
            "all ranks. Not logged for a learner that shares its process with an engine"),
    _metric("throughput/tokens_per_s throughput/completions_per_s",
            "Trained tokens and completions per second of wall-clock time since the previous row"),
    _metric("eval/SET/METRIC",
            "Metric of an evaluation set, such as pass@k or score, with its interval ([evaluation](evaluation.md))"),
)
# fmt: on
_EXACT = {name: metric for metric in METRICS for name in metric.names}


@cache
def pattern_of(name: str) -> str | None:
    """Returns the name in the table that matches a logged metric, or None."""
    if name in _EXACT:
        return name
    for pattern in _EXACT:
        expression = re.sub(r"[A-Z]{2,}", "[^/]+", re.sub(r"\bK$|(?<=_)K$", r"\\d+", pattern))
        if re.fullmatch(expression, name):
            return pattern
    return None


def meaning_of(name: str) -> str:
    """Returns the meaning of a logged metric without links and backquotes; empty if unknown."""
    pattern = pattern_of(name)
    if pattern is None:
        return ""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", _EXACT[pattern].meaning).replace("`", "")
