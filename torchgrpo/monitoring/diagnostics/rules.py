"""Table of the diagnostic rules: name, severity, metrics, check, likely cause, remedy.

`python -m tests.reference --write` generates docs/metrics.md from the table.
"""

from collections.abc import Callable
from itertools import pairwise

from torchgrpo.monitoring.diagnostics.metric_history import (
    MIN_RISE,
    NO_GRADIENT_STEPS,
    TREND_ROWS,
    Change,
    MetricHistory,
    explain_missing_gradient,
    mean,
)
from torchgrpo.monitoring.diagnostics.rule import Bound, Condition, CustomCheck, Observation, Rule, Trend, format_step

BOTTLENECK_SHARE = 0.7
"""Minimum share of idle time that indicates a bottleneck."""
WAITING_SHARE = 0.3
"""Minimum share of idle time of the engines that is reported while episodes wait for their environment."""
BEFORE_SOLVED = Condition(", before the task is solved", lambda history: not history.is_solved)
AFTER_SOLVED = Condition(", after the task is solved", lambda history: history.is_solved)
BEFORE_SOLVED_BY_REWARDS = Condition(
    ", before the task is solved",
    lambda history: not history.is_solved and not history.config.policy.trains_on_equal_rewards,
)
BEFORE_SOLVED_WITH_REWARDS = Condition(
    ", before the task is solved", lambda history: not history.is_solved and history.config.policy.reward_coef != 0
)
NEGATIVE_REWARDS = Condition(
    ", while the mean reward is below zero", lambda history: history.rows[-1]["reward/mean"] < 0
)
WITHOUT_WAITING_EPISODES = Condition(
    ", without unfinished episodes", lambda history: not history.rows[-1].get("episodes/alive", 0.0)
)


def above(limit: float, rows: int = 1, on_policy: bool = False) -> Bound:
    return Bound(f"above {limit:g}", lambda values, config: min(values) > limit, rows, on_policy)


def below(limit: float, rows: int = 1) -> Bound:
    return Bound(f"below {limit:g}", lambda values, config: max(values) < limit, rows)


def _check_gradients(rule: Rule, history: MetricHistory) -> Observation | None:
    count = len(history.no_gradient_rows)
    if count < NO_GRADIENT_STEPS:
        return None
    cause, remedy = explain_missing_gradient(list(history.no_gradient_rows), history.config)
    steps = f"optimizer steps {history.step - count + 1} to {history.step}"
    return Observation(f"{steps} had no gradient from rewards or a teacher", cause, remedy)


def _idle_check(learner: bool, engines: bool) -> Callable[[Rule, MetricHistory], Observation | None]:
    """Returns a check of the sides that are mostly idle in an overlapped run.

    learner, engines: True requires that the side is idle, False that the side is busy.
    """

    def check_idle_shares(rule: Rule, history: MetricHistory) -> Observation | None:
        newest = history.newest_rows(TREND_ROWS)
        engine_shares = [row["idle/engines"] for row in newest if "idle/engines" in row]
        if len(newest) < TREND_ROWS or not engine_shares:
            return None
        shares = (mean([row["idle/learner"] for row in newest]), mean(engine_shares))
        if [share > BOTTLENECK_SHARE for share in shares] != [learner, engines]:
            return None
        return Observation(f"idle/learner is {shares[0]:.2f} and idle/engines {shares[1]:.2f}{format_step(history)}")

    return check_idle_shares


def _check_waiting_episodes(rule: Rule, history: MetricHistory) -> Observation | None:
    newest = history.newest_rows(TREND_ROWS)
    rows = [row for row in newest if all(name in row for name in rule.metrics)]
    if len(newest) < TREND_ROWS or not rows:
        return None
    learner, engines, episodes = (mean([row[name] for row in rows]) for name in rule.metrics)
    if min(learner, engines) <= WAITING_SHARE or episodes < 1:
        return None
    shares = f"idle/learner is {learner:.2f} and idle/engines {engines:.2f}"
    return Observation(f"{shares} with {episodes:.0f} unfinished episodes{format_step(history)}")


def _check_evaluations(rule: Rule, history: MetricHistory) -> Observation | None:
    for name, (best, newest) in history.evaluation_scores.items():
        if newest.high < best.low and newest.reward > best.reward + MIN_RISE:
            score, reward = Change(best.value, newest.value), Change(best.reward, newest.reward)
            text = f"{name} went {score} since its best evaluation while reward/mean went {reward}"
            return Observation(f"{text}{format_step(history)}")
    return None


SMALLER_STEPS = "lower `optimizer.lr`, `train.epochs` or `train.max_policy_age`"
SAME_DTYPE = "use one dtype on both sides (`train.mixed_precision`, `inference_model.dtype`), or `policy.mismatch`"
GRADIENT_METRICS = ("reward/zero_variance_groups", "advantage/std", "grad_norm")
IDLE_METRICS = ("idle/learner", "idle/engines")
# fmt: off
RULES = (
    Rule("no_gradient", "alarm", GRADIENT_METRICS,
         CustomCheck(f"{NO_GRADIENT_STEPS} consecutive rows without a gradient from rewards or a teacher",
                     _check_gradients),
         "All groups had equal rewards, no completion could be scored, or no completion was in the loss; the finding "
         "names the reason",
         "change what the finding names: the reward, the prompts, `inference_model.max_tokens` or "
         "`policy.filter_range`",
         BEFORE_SOLVED),
    Rule("kl_high", "alarm", ("kl/ref",), above(2, rows=5),
         "The steps are too large, so the policy loses abilities of the reference model",
         "lower `optimizer.lr` or raise `policy.kl_coef`"),
    Rule("engine_trainer_kl", "alarm", ("kl/inference",), above(0.01, rows=2, on_policy=True),
         "Engine and trainer give the same tokens different probabilities, so no batch is on-policy",
         SAME_DTYPE),
    Rule("entropy_collapse", "alarm", ("entropy",), below(0.01, rows=5),
         "The policy became deterministic too early: the steps are too large, or no term keeps the entropy up",
         "lower `optimizer.lr`, raise `policy.entropy_coef` or `policy.kl_coef`",
         BEFORE_SOLVED),
    Rule("nonfinite_steps", "alarm", ("loss/nonfinite_steps",), above(0),
         "A loss or gradient was NaN or infinite; the batches are in the folder nonfinite/",
         "lower `optimizer.lr`, set `optimizer.clip_grad_norm`"),
    Rule("length_collapse", "alarm", ("length/response_mean", "groups/success"),
         Trend("at most half of the earlier length, and the success rate did not rise",
               lambda length: length.newest_mean <= 0.5 * length.oldest_mean),
         "The reward favours short completions, or penalizes long wrong ones so strongly that giving up early pays",
         "change `env.reward` or `env.reward_weights`; lower `optimizer.lr` or raise `policy.kl_coef`"),
    Rule("missing_end_token", "alarm", ("length/truncated",),
         Trend("from at most 0.5 to at least 0.95",
               lambda truncated: truncated.oldest_mean <= 0.5 and truncated.newest_mean >= 0.95),
         "The policy unlearned the end token: the reward counts text after the answer, or truncated completions get "
         "no score",
         "set `policy.filter_truncated=false` or `policy.overlong_cache`, or use an `env.reward` that "
         "reads the end of the answer"),
    Rule("component_hacked", "alarm", ("reward/COMPONENT", "groups/success"),
         Trend("up by a quarter and by 0.1, near its maximum, and the success rate did not rise",
               lambda component: component.newest_mean
               >= max(component.oldest_mean + 0.1, 1.25 * component.oldest_mean, 0.9 * component.maximum)),
         "Reward hacking: the policy maximizes a component that is easier to get than a right answer",
         "lower the component's weight in `env.reward_weights`, or grant the component only for right answers",
         BEFORE_SOLVED),
    Rule("evaluation_drop", "alarm", ("eval/SET/pass@1", "reward/mean"),
         CustomCheck("the 95% interval of pass@1 lies below that of the best evaluation, and the training reward rose "
                     "since",
                     _check_evaluations),
         "Reward hacking, or the policy memorizes the training prompts",
         "resume from the checkpoint of the best evaluation; fix `env.reward`, use more prompts, raise "
         "`policy.kl_coef`"),
    Rule("reward_plateau", "warning", ("reward/mean",),
         Bound("does not rise", lambda values, _: mean(values[-10:]) <= mean(values[:10]), rows=50),
         "Equal rewards, truncated completions, a reward that expects another form, or an unsuitable learning rate",
         "read the printed samples (`logging.sample_frequency`), then check `optimizer.lr`",
         BEFORE_SOLVED_WITH_REWARDS),
    Rule("zero_variance", "warning", ("reward/zero_variance_groups",), above(0.8, rows=5),
         "All completions of a group get the same reward, because the prompts are too easy or too hard",
         "use other prompts (`env.difficulty`), a larger `env.repeats`, or a reward with more values "
         "between 0 and 1",
         BEFORE_SOLVED_BY_REWARDS),
    Rule("reward_errors", "warning", ("reward/errors",), above(0),
         "An error in the reward, or rows that the reward cannot score; these completions are left out of training and "
         "metrics",
         "fix `env.reward`, the rows, `env.environment` or `env.agent`; the log and run=rollouts show the messages"),
    Rule("control_tokens", "warning", ("reward/control_tokens",), above(0.1, rows=3),
         "The model continues after the end of its turn",
         "check that its end tokens are in the generation_config.json of `model.name`"),
    Rule("reward_workers_replaced", "warning", ("reward/workers_replaced",),
         Bound("grows", lambda values, _: all(later > earlier for earlier, later in pairwise(values)), rows=6),
         "Some completions make the reward hang or crash",
         "test such completions with run=rewards; check `env.reward_timeout_s` and `env.reward_memory_gib`"),
    Rule("slow_rewards", "warning", ("reward_latency/p99_s",),
         Bound("above 0.8 of `env.reward_timeout_s`",
               lambda values, config: min(values) > 0.8 * config.env.reward_timeout_s, rows=3),
         "The slowest rewards are close to the time limit, beyond which a completion is invalid",
         "raise `env.reward_timeout_s`, or make the reward faster"),
    Rule("overlong_penalty", "warning", ("reward/overlong_penalty",), below(-0.1, rows=5),
         "Completions reach the token limit, and the penalty of `policy.overlong_*` exceeds most rewards",
         "raise `inference_model.max_tokens`"),
    Rule("groups_replaced", "warning", ("groups/generated",),
         Bound("above 3 times the batch",
               lambda values, config: min(values) > 3 * config.optim_batch_groups, rows=5),
         "Dynamic sampling drops most groups, because the prompts are too easy or too hard",
         "use prompts of a suitable difficulty (`env.difficulty`), or a larger `env.repeats`"),
    Rule("duplicate_prompts", "warning", ("prompts/duplicates",), above(0.1, rows=5),
         "Rows occur more than once in the data, or the data have fewer prompts than a batch",
         "set `env.duplicates=first`, add prompts, or lower `env.num_envs`"),
    Rule("repeated_prompt", "warning", ("prompts/max_repeat_ratio",), above(5, rows=10),
         "A row occurs many times in the data, a small data set of a mixture has a large weight, or the curriculum "
         "prefers few prompts",
         "set `env.duplicates=first`, change the weights in `env.mixture`, or raise `env.curriculum.floor`"),
    Rule("duplicate_completions", "warning", ("groups/duplicates",), above(0.95, rows=5),
         "The policy or its sampling is nearly deterministic; a group of equal completions has no gradient",
         "raise `inference_model.temperature` or `policy.entropy_coef`, lower `optimizer.lr`",
         BEFORE_SOLVED_BY_REWARDS),
    Rule("ratio_drift", "warning", ("ratio/mean",),
         Bound("below 0.5 or above 2", lambda values, _: max(values) < 0.5 or min(values) > 2, rows=3),
         "The policy moves far from the policy that sampled the batch while it trains on the batch",
         SMALLER_STEPS),
    Rule("low_ess", "warning", ("ess", "ess/age_K"), below(0.5, rows=3),
         "A few tokens dominate the batch: the policy is far from the policy that sampled the batch",
         SMALLER_STEPS),
    Rule("engine_trainer_logprob_diff", "warning", ("logprob_diff/p99",), above(0.1, rows=2, on_policy=True),
         "Engine and trainer differ in dtype, kernel or quantization",
         SAME_DTYPE),
    Rule("clip_fraction", "warning", ("loss/clip_fraction_low", "loss/clip_fraction_high"), above(0.2, rows=3),
         "The steps are so large, or the batch is so old, that the clip removes much of the gradient",
         SMALLER_STEPS),
    Rule("truncation", "warning", ("length/truncated",), above(0.1, rows=5),
         "Completions exceed the token limit and are scored without their end, or a reply of the environment does not "
         "fit",
         "raise `inference_model.max_tokens`, for episodes `env.max_episode_tokens`, or request shorter answers"),
    Rule("stale_groups", "warning", ("groups/dropped_stale",),
         Bound("up by a quarter of the groups in training",
               lambda values, config: values[-1] - values[0] > config.optim_batch_groups * (len(values) - 1) / 4,
               rows=21),
         "The engines start more groups than the learner can consume before the groups are too old",
         "set `train.stale_groups=wait`, lower `env.num_envs`, or raise `train.max_policy_age`"),
    Rule("length_growth", "warning", ("length/response_mean", "reward/mean", "groups/success"),
         Trend("at least 1.5 times the earlier length, and neither the reward nor the success rate rose",
               lambda length: length.newest_mean >= 1.5 * length.oldest_mean),
         "The length itself changes the loss: long wrong completions have a smaller penalty per token, or the reward "
         "favours length",
         "change `policy.aggregation`, set `policy.overlong_cache`, or lower `inference_model.max_tokens`"),
    Rule("kl_growth", "warning", ("kl/ref", "reward/mean"),
         Trend("above 0.5 and three times the earlier value, and the reward did not rise",
               lambda kl: kl.newest_mean >= max(0.5, 3 * kl.oldest_mean)),
         "The policy drifts without learning: the gradient is noise, or the reward does not depend on the completion",
         "raise `policy.kl_coef`, lower `optimizer.lr`, or use a larger `env.num_envs`",
         BEFORE_SOLVED),
    Rule("invalid_growth", "warning", ("reward/invalid", "groups/success"),
         Trend("up by 0.1 and twice the earlier share, and the success rate did not rise",
               lambda invalid: invalid.newest_mean >= max(invalid.oldest_mean + 0.1, 2 * invalid.oldest_mean)),
         "Invalid completions score as much as wrong ones, or the policy forgets how to end a turn",
         "declare the minimum of `env.reward` (FUNCTION.min_score = -1.0), lower `optimizer.lr`, raise "
         "`policy.kl_coef`"),
    Rule("invalid_not_penalized", "warning", ("reward/invalid_gap",),
         Bound("not above 0", lambda values, config: max(values) <= 1e-6),
         "The reward declares no minimum, so invalid completions get the lowest reward of the run so far",
         "declare a minimum below the reward of a wrong answer: FUNCTION.min_score = -4.0 in the module of "
         "`env.reward`",
         NEGATIVE_REWARDS),
    Rule("prompt_echo", "warning", ("completions/prompt_echo",), above(0.5, rows=5),
         "The reward finds the answer in a repeated question, or the model continues the question instead of answering",
         "make `env.reward` score the end of the completion; test with run=rewards how it scores the question alone"),
    Rule("environment_errors", "warning", ("agent/end/error",), above(0),
         "An environment or agent raised an error, hung or returned nothing valid; these episodes are left out",
         "fix `env.environment` or `env.agent`; run=rollouts rollouts.outcome=error prints the errors"),
    Rule("episode_deadline", "warning", ("agent/end/deadline",), above(0.1, rows=3),
         "Episodes take longer than the deadline and are scored without their end",
         "raise `env.episode_timeout_s`, lower `env.max_steps`, or make the environment faster"),
    Rule("malformed_calls", "warning", ("tools/malformed",), above(0.2, rows=5),
         "The model writes tool calls that cannot be parsed: in another form than the parser reads, or cut by a limit",
         "set `env.tool_parser` to the model's form; raise `inference_model.max_tokens`"),
    Rule("task_solved", "info", GRADIENT_METRICS,
         CustomCheck(f"{NO_GRADIENT_STEPS} consecutive rows without a gradient", _check_gradients),
         "Every completion is right, so these prompts have no gradient any more",
         "use harder prompts, or a smaller `train.total_dialog_turns`",
         AFTER_SOLVED),
    Rule("idle_learner", "info", IDLE_METRICS,
         CustomCheck(f"the learner of an overlapped run is idle for more than {BOTTLENECK_SHARE:.0%} of 10 rows",
                     _idle_check(True, False)),
         "Generation is the bottleneck",
         "add engines (`inference_model.num_devices`), or raise `env.num_envs`"),
    Rule("idle_engines", "info", IDLE_METRICS,
         CustomCheck(f"the engines of an overlapped run are idle for more than {BOTTLENECK_SHARE:.0%} of 10 rows",
                     _idle_check(False, True)),
         "Training is the bottleneck",
         "give the learner more devices or threads (`train_model.num_devices`, `train_model.num_threads`)"),
    Rule("idle_both", "info", IDLE_METRICS,
         CustomCheck(f"both sides of an overlapped run are idle for more than {BOTTLENECK_SHARE:.0%} of 10 rows",
                     _idle_check(True, True)),
         "Scoring is the bottleneck, or too few groups are in flight",
         "raise `env.reward_workers`, make the reward faster, or raise `env.num_envs`",
         WITHOUT_WAITING_EPISODES),
    Rule("waiting_episodes", "info", (*IDLE_METRICS, "episodes/alive"),
         CustomCheck(f"both sides of an overlapped run are idle for more than {WAITING_SHARE:.0%} of 10 rows, with "
                     "unfinished episodes", _check_waiting_episodes),
         "The engines have no requests while all episodes wait for their environment",
         "raise `env.episodes` or `env.num_envs`, or make the environment faster"),
    Rule("history_rewritten", "info", ("agent/sequences",),
         Bound("at least 2", lambda values, config: min(values) >= 2, rows=3),
         "The chat template or the environment rewrites earlier messages, so one episode is several token sequences, "
         "each with a prompt of its own",
         "use a template that keeps earlier turns (`model.chat_template=FILE`), or `env.history=append`; keep it if "
         "the environment returns `Step(history=...)`"),
)
# fmt: on
"""All rules, alarms first."""
