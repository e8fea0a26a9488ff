"""Tests of the diagnostic rules on rows of a healthy run with few changed metrics."""

from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import RunError
from tests.script_runner import compose_run_config
from torchgrpo.monitoring.diagnostics.diagnostics import Diagnostics
from torchgrpo.monitoring.diagnostics.metric_history import NO_GRADIENT_STEPS
from torchgrpo.monitoring.diagnostics.rule import Bound, Rule, Trend
from torchgrpo.monitoring.diagnostics.rules import RULES

HEALTHY = {
    "reward/mean": 0.4,
    "reward/zero_variance_groups": 0.3,
    "reward/errors": 0.0,
    "reward/invalid": 0.02,
    "reward/format": 0.2,
    "reward/workers_replaced": 0.0,
    "reward_latency/p99_s": 0.1,
    "groups/generated": 32.0,
    "groups/dropped_stale": 0.0,
    "groups/duplicates": 0.5,
    "groups/success": 0.4,
    "completions/prompt_echo": 0.0,
    "prompts/duplicates": 0.0,
    "prompts/max_repeat_ratio": 1.5,
    "advantage/mean": 0.0,
    "advantage/std": 0.8,
    "sample_utilization": 1.0,
    "kl/ref": 0.1,
    "kl/inference": 1e-6,
    "ratio/mean": 1.0,
    "ess": 1.0,
    "ess/age_0": 1.0,
    "ess/age_1": 0.9,
    "logprob_diff/p99": 0.01,
    "loss/clip_fraction_low": 0.0,
    "loss/clip_fraction_high": 0.01,
    "loss/nonfinite_steps": 0.0,
    "entropy": 0.5,
    "grad_norm": 1.0,
    "length/response_mean": 4.0,
    "length/truncated": 0.0,
}
"""Row of a healthy run. `row` adds a rising reward."""

NO_GRADIENT = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.0, "grad_norm": 0.0}


@pytest.fixture(scope="module")
def config() -> Config:
    return compose_run_config()


def diagnose_rows(
    config: Config, steps: int, is_overlapped: bool = False, **changes: Any
) -> tuple[Diagnostics, list[str]]:
    """Returns the diagnostics after `steps` rows, and the lines of all findings.

    changes: metrics by name; a value, or a function of the step.
    """
    diagnostics, lines = Diagnostics(config), []
    idle_shares = {"idle/engines": 0.1, "idle/learner": 0.1} if is_overlapped else {}
    for step in range(1, steps + 1):
        lines += [finding.line for finding in diagnostics.check_row(row(step, idle_shares | changes))]
    return diagnostics, lines


def finding_lines(config: Config, steps: int, is_overlapped: bool = False, **changes: Any) -> list[str]:
    """Returns the lines of all findings in `steps` rows."""
    return diagnose_rows(config, steps, is_overlapped, **changes)[1]


def row(step: int, changes: dict[str, Any]) -> dict[str, Any]:
    values = {"optimizer_step": step, **HEALTHY, "reward/mean": 0.1 + 0.001 * step}
    return values | {name: float(change(step)) if callable(change) else change for name, change in changes.items()}


def test_run_that_learns_has_no_finding(config: Config) -> None:
    assert finding_lines(config, 200) == []
    assert finding_lines(config, 200, is_overlapped=True) == []


BOUNDS: dict[str, tuple[str, Any, Any]] = {
    "kl_high": ("kl/ref", 2.5, 1.9),
    "engine_trainer_kl": ("kl/inference", 0.02, 0.009),
    "entropy_collapse": ("entropy", 0.001, 0.011),
    "nonfinite_steps": ("loss/nonfinite_steps", 1.0, 0.0),
    "reward_plateau": ("reward/mean", 0.4, lambda step: 0.4 + 0.001 * step),
    "zero_variance": ("reward/zero_variance_groups", 0.85, 0.8),
    "reward_errors": ("reward/errors", 0.001, 0.0),
    "control_tokens": ("reward/control_tokens", 0.2, 0.1),
    "reward_workers_replaced": ("reward/workers_replaced", lambda step: step, 3.0),
    "slow_rewards": ("reward_latency/p99_s", 9.0, 7.9),
    "overlong_penalty": ("reward/overlong_penalty", -0.2, -0.1),
    "groups_replaced": ("groups/generated", 100.0, 96.0),
    "duplicate_prompts": ("prompts/duplicates", 0.2, 0.1),
    "repeated_prompt": ("prompts/max_repeat_ratio", 6.0, 5.0),
    "duplicate_completions": ("groups/duplicates", 0.96, 0.95),
    "ratio_drift": ("ratio/mean", 0.4, 1.9),
    "low_ess": ("ess", 0.4, 0.5),
    "engine_trainer_logprob_diff": ("logprob_diff/p99", 0.2, 0.1),
    "clip_fraction": ("loss/clip_fraction_low", 0.3, 0.2),
    "truncation": ("length/truncated", 0.2, 0.1),
    "stale_groups": ("groups/dropped_stale", lambda step: 10 * step, lambda step: 8 * step),
    "invalid_not_penalized": ("reward/invalid_gap", 0.0, 0.5),
    "prompt_echo": ("completions/prompt_echo", 0.6, 0.5),
    "environment_errors": ("agent/end/error", 0.01, 0.0),
    "episode_deadline": ("agent/end/deadline", 0.2, 0.1),
    "malformed_calls": ("tools/malformed", 0.3, 0.2),
    "history_rewritten": ("agent/sequences", 2.0, 1.9),
}
"""By rule with a bound: metric, value beyond the bound, value within the bound."""
MORE_CHANGES = {"invalid_not_penalized": {"reward/mean": lambda step: 0.001 * step - 3}, "low_ess": {"ess/age_1": 0.5}}
"""Further changes of metrics, by rule."""
TREND_CHANGES: dict[str, dict[str, Any]] = {
    "length_collapse": {"length/response_mean": lambda step: 80 / (10 + step)},
    "missing_end_token": {"length/truncated": lambda step: step > 20},
    "component_hacked": {"reward/format": lambda step: min(step, 25) / 25},
    "length_growth": {"length/response_mean": lambda step: 10 + step, "reward/mean": 0.4},
    "kl_growth": {"kl/ref": lambda step: step / 25, "reward/mean": 0.4},
    "invalid_growth": {"reward/invalid": lambda step: step / 80},
}
"""By rule with a trend: changes over 40 rows that trigger the rule."""
CUSTOM_CHANGES: dict[str, dict[str, Any]] = {
    "no_gradient": NO_GRADIENT,
    "task_solved": {"reward/mean": lambda step: min(0.95, 0.1 * step), "grad_norm": lambda step: step < 20},
    "idle_learner": {"idle/learner": 0.9, "idle/engines": 0.1},
    "idle_engines": {"idle/learner": 0.1, "idle/engines": 0.9},
    "idle_both": {"idle/learner": 0.9, "idle/engines": 0.9},
    "waiting_episodes": {"idle/learner": 0.9, "idle/engines": 0.9, "episodes/alive": 64.0},
}
OTHER_FINDINGS = {"missing_end_token": {"truncation"}, "no_gradient": {"zero_variance"}}
"""Further rules that the same changes trigger."""


def test_all_rules_have_a_test() -> None:
    """Counts `evaluation_drop`, which needs rows of evaluations, as tested below."""
    rules = {*BOUNDS, *TREND_CHANGES, *CUSTOM_CHANGES, "evaluation_drop"}
    assert rules == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule.check, Bound)], ids=lambda rule: rule.name)
def test_bound_is_reported_once_with_value_step_cause_and_setting(config: Config, rule: Rule) -> None:
    assert isinstance(rule.check, Bound)
    name, value, _ = BOUNDS[rule.name]
    changes = {name: value} | MORE_CHANGES.get(rule.name, {})
    assert finding_lines(config, rule.check.rows - 1, **changes) == []
    (line,) = finding_lines(config, rule.check.rows + 45, **changes)
    newest = value(rule.check.rows) if callable(value) else value
    text = f"{name} is {newest:.3g} at optimizer step {rule.check.rows} ({rule.condition_text})"
    assert line.startswith(f"{rule.severity}: {text}. ")
    assert rule.cause.replace("`", "") in line and line.endswith(rule.setting.replace("`", ""))


@pytest.mark.parametrize("rule", BOUNDS)
def test_value_within_a_bound_has_no_finding(config: Config, rule: str) -> None:
    name, _, value = BOUNDS[rule]
    assert finding_lines(config, 45, **{name: value}, **MORE_CHANGES.get(rule, {})) == []


@pytest.mark.parametrize("name", [*TREND_CHANGES, *CUSTOM_CHANGES])
def test_trends_and_other_rules_hold_where_they_should(config: Config, name: str) -> None:
    diagnostics, _ = diagnose_rows(config, 40, **(TREND_CHANGES | CUSTOM_CHANGES)[name])
    assert set(diagnostics.findings) == {name} | OTHER_FINDINGS.get(name, set())


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule.check, Trend)], ids=lambda rule: rule.name)
def test_a_trend_needs_a_window_and_others_that_do_not_rise(config: Config, rule: Rule) -> None:
    changes = TREND_CHANGES[rule.name]
    assert rule.name not in diagnose_rows(config, 19, **changes)[0].findings
    for other in rule.metrics[1:]:
        rising = changes | {other: lambda step: 0.1 + 0.01 * step}
        assert rule.name not in diagnose_rows(config, 40, **rising)[0].findings
    (text,) = [line for line in finding_lines(config, 40, **changes) if rule.cause.replace("`", "") in line]
    assert all(f"{name} went from " in text for name in (*[*changes][:1], *rule.metrics[1:]))


def test_small_changes_are_no_trend(config: Config) -> None:
    small = {
        "length/response_mean": lambda step: 10 + 0.1 * step,
        "length/truncated": lambda step: 0.09 * (step > 20),
        "reward/format": lambda step: 0.5 + 0.002 * step,
        "kl/ref": lambda step: 0.01 * step,
        "reward/invalid": lambda step: 0.02 + 0.002 * step,
    }
    assert finding_lines(config, 40, **small, **{"reward/mean": 0.4}) == []


def test_component_that_fell_again_is_not_hacked(config: Config) -> None:
    changes = {"reward/format": lambda step: 0.2 if step < 12 else 0.9 if step < 15 else 0.5}
    assert finding_lines(config, 45, **changes) == []


def evaluation_row(step: int, value: float) -> dict[str, Any]:
    name = "eval/sums/pass@1"
    return {"optimizer_step": step, name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}


@pytest.mark.parametrize(("later", "reward", "has_finding"), [(0.3, 0.6, True), (0.45, 0.6, False), (0.3, 0.4, False)])
def test_evaluation_drop_needs_a_lower_interval_and_a_risen_reward(
    config: Config, later: float, reward: float, has_finding: bool
) -> None:
    diagnostics = Diagnostics(config)
    diagnostics.check_row(evaluation_row(0, 0.2))
    for step in range(1, 31):
        diagnostics.check_row(row(step, {"reward/mean": 0.4 if step < 11 else reward}))
        if step in (10, 20, 30):
            new = diagnostics.check_row(evaluation_row(step, 0.6 if step == 10 else later))
            assert bool(new) == (has_finding and step == 20)
    assert ("evaluation_drop" in diagnostics.findings) == has_finding
    if has_finding:
        finding = diagnostics.findings["evaluation_drop"]
        assert finding.text.startswith("eval/sums/pass@1 went from 0.6 to 0.3 since its best evaluation while reward/")
        assert (finding.first_step, finding.last_step) == (20, 30)


@pytest.mark.parametrize(
    ("learner", "engines", "episodes", "has_finding"),
    [(0.6, 0.4, 8.0, True), (0.6, 0.4, 0.0, False), (0.6, 0.2, 8.0, False), (0.2, 0.6, 8.0, False)],
)
def test_episodes_wait_if_engines_and_learner_do(
    config: Config, learner: float, engines: float, episodes: float, has_finding: bool
) -> None:
    """A busy learner, or busy engines, is another bottleneck than the environment."""
    changes = {"idle/learner": learner, "idle/engines": engines, "episodes/alive": episodes}
    assert finding_lines(config, 9, **changes) == []
    lines = finding_lines(config, 20, **changes)
    assert len(lines) == has_finding
    if has_finding:
        assert lines[0].startswith("info: idle/learner is 0.60 and idle/engines 0.40 with 8 unfinished episodes at ")
        assert lines[0].endswith("raise env.episodes or env.num_envs, or make the environment faster")


def test_an_environment_that_gives_no_reward_is_named(config: Config) -> None:
    always_zero = {"reward/mean": 0.0, "turns/max": 3.0, **NO_GRADIENT}
    _, (line, *_) = diagnose_rows(config, NO_GRADIENT_STEPS, **always_zero)
    assert line.startswith("alarm: ") and "had equal rewards (mean 0.00)" in line
    assert "read episodes with run=rollouts: does the environment give rewards" in line
    for others in ({"reward/mean": 0.5}, {"turns/max": None}):
        rows = [{key: value for key, value in (always_zero | others).items() if value is not None}]
        _, (line, *_) = diagnose_rows(config, NO_GRADIENT_STEPS, **rows[0])
        assert "does the environment give rewards" not in line


def test_overlapped_run_with_several_epochs_is_recognized_at_each_step() -> None:
    """Logs `idle/engines` only in the first epoch of each batch."""
    config = compose_run_config("train.epochs=3")
    diagnostics = Diagnostics(config)
    for step in range(1, 10):
        diagnostics.check_row(row(step, {"idle/engines": 0.1} if step % 3 == 1 else {}))
    assert diagnostics.history.is_overlapped and not diagnostics.history.on_policy_rows


@pytest.mark.parametrize("name", ["loss/clip_fraction_high", "ess/age_0", "ess/age_12"])
def test_a_bound_holds_for_each_of_its_metrics(config: Config, name: str) -> None:
    (line,) = finding_lines(config, 10, **{name: 0.4})
    assert name in line


def test_loss_metrics_are_ignored_without_tokens_in_the_loss(config: Config) -> None:
    zeros = {"entropy": 0.0, "ratio/mean": 0.0, "ess": 0.0, "ess/age_1": 0.0}
    assert len(finding_lines(config, 20, **zeros)) == 3
    assert finding_lines(config, 20, **zeros, sample_utilization=0.0) == []


def test_single_bad_row_has_no_finding(config: Config) -> None:
    assert finding_lines(config, 40, **{"length/truncated": lambda step: 0.5 * (step % 5 == 0)}) == []
    assert finding_lines(config, 40, **{"ratio/mean": lambda step: 0.1 if step % 2 else 5.0}) == []


def test_lockstep_bounds_check_the_first_step_of_an_iteration() -> None:
    several = compose_run_config("train.optim_batch_size=64", "env.num_envs=32")  # three of four steps are off-policy
    later = {"logprob_diff/p99": lambda step: 0.5 * (step % 4 != 1), "kl/inference": lambda step: step % 4 != 1}
    later |= {"groups/generated": 8.0}
    assert finding_lines(several, 40, **later) == []
    first = {"logprob_diff/p99": lambda step: 0.5 * (step % 4 == 1), "groups/generated": 8.0}
    (line,) = finding_lines(several, 40, **first)
    assert "logprob_diff/p99 is 0.5 at optimizer step 5 " in line


def test_lockstep_bounds_need_lockstep() -> None:
    ahead = compose_run_config("train.max_policy_age=1")
    together = compose_run_config("train.max_policy_age=0")
    changes = {"logprob_diff/p99": 0.5}
    assert finding_lines(ahead, 20, is_overlapped=True, **changes) == []
    assert len(finding_lines(together, 20, is_overlapped=True, **changes)) == 1


def test_solved_task_has_no_finding(config: Config) -> None:
    solved = {
        "reward/mean": lambda step: min(0.95, 0.1 * step),
        "reward/zero_variance_groups": lambda step: 0.3 if step < 20 else 0.95,
        "entropy": lambda step: 0.5 if step < 20 else 0.005,
    }
    assert finding_lines(config, 200, **solved) == []
    lines = finding_lines(config, 200, **{**solved, "reward/mean": 0.95})  # the accuracy never rose
    assert [line.split()[1] for line in lines] == ["entropy", "reward/zero_variance_groups", "reward/mean"]


def test_five_steps_without_a_gradient_are_reported_once(config: Config) -> None:
    changes = NO_GRADIENT | {"reward/mean": 0.0, "length/truncated": 0.99}
    lines = finding_lines(config, 30, **changes)
    (line,) = [line for line in lines if "had no gradient" in line]
    assert line.startswith(
        "alarm: optimizer steps 1 to 5 had no gradient from rewards or a teacher. All 32 groups had equal rewards "
        "(mean 0.00), 99% of the completions were truncated at 8 tokens. Remedy: raise inference_model.max_tokens; "
    )
    assert NO_GRADIENT_STEPS == 5 and lines.index(line) == 0


def test_four_steps_without_a_gradient_are_not_reported(config: Config) -> None:
    gradients = {name: (lambda step: step % 5 == 0) for name in ("advantage/std", "grad_norm")}
    equal = {"reward/zero_variance_groups": lambda step: 0.5 if step % 5 == 0 else 1.0}
    assert finding_lines(config, 40, **gradients, **equal) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward/errors": 0.99, "sample_utilization": 0.0}, "99% of the completions could not be scored"),
        ({"reward/mean": 1.0}, "(mean 1.00). Remedy: use harder prompts: every completion is right"),
        ({"grad_norm": 0.3}, "only the KL to the reference had a gradient"),
        ({"reward/invalid": 0.9}, "90% of the completions were invalid"),
        ({"grad_norm": float("nan"), "reward/zero_variance_groups": 0.2}, "Gradients were not finite"),
    ],
)
def test_causes_of_a_missing_gradient(config: Config, changes: dict[str, float], expected: str) -> None:
    lines = [line for line in finding_lines(config, 5, **(NO_GRADIENT | changes)) if "had no gradient" in line]
    assert len(lines) == 1 and expected in lines[0]


def test_filter_that_drops_all_groups_is_named() -> None:
    dapo = compose_run_config("policy=dapo")
    changes = {"advantage/std": 0.0, "grad_norm": 0.0, "sample_utilization": 0.0}
    (line,) = finding_lines(dapo, 5, **changes)
    assert "No completion was in the loss. Remedy: widen policy.filter_range=[0" in line


def check_gradients(config: Config, rows: list[dict[str, Any]], steps: int | None = None) -> None:
    """Runs the check at the end of a run with these rows."""
    diagnostics = Diagnostics(config)
    diagnostics.add_past_rows(rows)
    diagnostics.check_gradients(len(rows) if steps is None else steps)


def test_run_without_any_gradient_is_an_error(config: Config) -> None:
    idle = [row(step, NO_GRADIENT | {"reward/mean": 0.0}) for step in (1, 2, 3)]
    with pytest.raises(RunError, match=r"nothing was learned: none of 3 optimizer steps.*All 32 groups"):
        check_gradients(config, idle)
    check_gradients(config, [row(1, {}), *idle])  # one step is enough, because the task may be solved afterwards
    check_gradients(config, idle, steps=10)  # rows of seven steps are missing
    check_gradients(config, [], steps=0)


def test_gradient_of_the_kl_alone_does_not_count(config: Config) -> None:
    """Uses advantages that differ by the KL alone, as with policy.kl_placement=reward."""
    only_kl = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.9, "grad_norm": 0.5}
    with pytest.raises(RunError, match="only the KL to the reference had a gradient"):
        check_gradients(config, [row(1, only_kl)])
    check_gradients(config, [row(1, only_kl | {"reward/overlong_penalty": -0.05})])  # length penalties differ
    alone = compose_run_config("policy.baseline=none", "policy.scale=none")
    check_gradients(alone, [row(1, only_kl | {"advantage/mean": 1.0})])


def test_gradient_of_a_teacher_counts_with_equal_rewards() -> None:
    equal = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.0, "groups/duplicates": 1.0}
    for fields in (("policy=opsd",), ("policy=opd", "ref_model.name=teacher", "policy.reward_coef=1")):
        config = compose_run_config(*fields)
        assert finding_lines(config, 40, **equal) == []
        check_gradients(config, [row(step, equal) for step in (1, 2, 3)])
    flat = finding_lines(compose_run_config("policy=opsd"), 60, **equal, **{"reward/mean": 0.4})
    assert flat == []  # rewards are only measured


def test_teacher_equal_to_the_policy_has_no_gradient() -> None:
    no_difference = NO_GRADIENT | {"kl/teacher": 0.0}
    config = compose_run_config("policy=opd", "ref_model.name=teacher")
    with pytest.raises(RunError, match=r"came from a teacher. The teacher gives every token the same .*opsd"):
        check_gradients(config, [row(step, no_difference) for step in (1, 2, 3)])
    (line,) = finding_lines(config, 5, **no_difference)
    assert "equal rewards" not in line and "had no gradient" in line


def test_resumed_run_keeps_earlier_findings_and_gradients(config: Config) -> None:
    diagnostics = Diagnostics(config)
    diagnostics.add_past_rows([row(step, {"reward/errors": 0.5}) for step in (1, 2, 3)])
    later = [
        diagnostics.check_row(row(step, NO_GRADIENT | {"reward/errors": 0.5, "reward/mean": 1.0})) for step in (4, 5)
    ]
    assert later == [[], []]
    diagnostics.check_gradients(5)
