"""Every rule of the doctor by rows of a healthy run in which few numbers are changed, and silence where all is well."""

from typing import Any

import pytest

from config.schema.config import Config
from config.schema.errors import RunError
from tests.scripts import configured
from torchgrpo.monitoring.doctor.doctor import Doctor
from torchgrpo.monitoring.doctor.history import IDLE_STEPS
from torchgrpo.monitoring.doctor.rules import RULES, Bound, Rule, Trend

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
    "groups/repeats_question": 0.0,
    "prompts/repeated": 0.0,
    "prompts/most_drawn": 1.5,
    "advantage/mean": 0.0,
    "advantage/std": 0.8,
    "sample_utilization": 1.0,
    "kl/ref": 0.1,
    "kl/inference": 1e-6,
    "ratio/mean": 1.0,
    "ess": 1.0,
    "ess/age_0": 1.0,
    "ess/age_1": 0.9,
    "mismatch/p99": 0.01,
    "loss/clip_fraction_low": 0.0,
    "loss/clip_fraction_high": 0.01,
    "loss/nonfinite_steps": 0.0,
    "entropy": 0.5,
    "grad_norm": 1.0,
    "length/response_mean": 4.0,
    "length/truncated": 0.0,
}
"""A row in which nothing is wrong. Rewards rise where `run_of` makes several."""

NOTHING = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.0, "grad_norm": 0.0}


@pytest.fixture(scope="module")
def config() -> Config:
    return configured()


def doctor_of(
    config: Config, steps: int, overlapped: bool = False, **changes: Any
) -> tuple[Doctor, list[str]]:
    """A doctor that has seen `steps` rows, and what it said. A change is a value, or a function of the step."""
    doctor, said = Doctor(config), []
    beside = {"idle/engines": 0.1, "idle/learner": 0.1} if overlapped else {}
    for step in range(1, steps + 1):
        said += [finding.line for finding in doctor.see(row(step, beside | changes))]
    return doctor, said


def run_of(config: Config, steps: int, overlapped: bool = False, **changes: Any) -> list[str]:
    return doctor_of(config, steps, overlapped, **changes)[1]


def row(step: int, changes: dict[str, Any]) -> dict[str, Any]:
    values = {"optimizer_step": step, **HEALTHY, "reward/mean": 0.1 + 0.001 * step}
    return values | {
        name: float(change(step)) if callable(change) else change for name, change in changes.items()
    }


def test_nothing_is_said_of_a_run_that_learns(config: Config) -> None:
    assert run_of(config, 200) == []
    assert run_of(config, 200, overlapped=True) == []


BOUNDS: dict[str, tuple[str, Any, Any]] = {
    "kl_far": ("kl/ref", 2.5, 1.9),
    "engine_trainer_kl": ("kl/inference", 0.02, 0.009),
    "entropy_collapse": ("entropy", 0.001, 0.011),
    "nonfinite": ("loss/nonfinite_steps", 1.0, 0.0),
    "reward_flat": ("reward/mean", 0.4, lambda step: 0.4 + 0.001 * step),
    "zero_variance": ("reward/zero_variance_groups", 0.85, 0.8),
    "reward_errors": ("reward/errors", 0.001, 0.0),
    "control_tokens": ("reward/control_tokens", 0.2, 0.1),
    "workers_replaced": ("reward/workers_replaced", lambda step: step, 3.0),
    "slow_rewards": ("reward_latency/p99_s", 9.0, 7.9),
    "overlong": ("reward/length", -0.2, -0.1),
    "many_replaced": ("groups/generated", 100.0, 96.0),
    "duplicated_prompts": ("prompts/repeated", 0.2, 0.1),
    "favoured_prompt": ("prompts/most_drawn", 6.0, 5.0),
    "duplicated_completions": ("groups/duplicates", 0.96, 0.95),
    "ratio_far": ("ratio/mean", 0.4, 1.9),
    "low_ess": ("ess", 0.4, 0.5),
    "engine_trainer_gap": ("mismatch/p99", 0.2, 0.1),
    "clip_share": ("loss/clip_fraction_low", 0.3, 0.2),
    "truncation": ("length/truncated", 0.2, 0.1),
    "stale_drops": ("groups/dropped_stale", lambda step: 10 * step, lambda step: 8 * step),
    "invalid_unpunished": ("reward/invalid_gap", 0.0, 0.5),
    "repeats_question": ("groups/repeats_question", 0.6, 0.5),
}
"""By rule with a bound: its metric, a value beyond it, one within it."""
BESIDE = {
    "invalid_unpunished": {"reward/mean": lambda step: 0.001 * step - 3},
    "low_ess": {"ess/age_1": 0.5},
}
"""Further changes by rule."""
MOVED: dict[str, dict[str, Any]] = {
    "length_collapse": {"length/response_mean": lambda step: 80 / (10 + step)},
    "end_token_vanished": {"length/truncated": lambda step: step > 20},
    "part_hacked": {"reward/format": lambda step: min(step, 25) / 25},
    "length_growth": {"length/response_mean": lambda step: 10 + step, "reward/mean": 0.4},
    "kl_growth": {"kl/ref": lambda step: step / 25, "reward/mean": 0.4},
    "invalid_growth": {"reward/invalid": lambda step: step / 80},
}
"""By rule with a trend, the changes of 40 rows that trigger it."""
OTHERS: dict[str, dict[str, Any]] = {
    "nothing_taught": NOTHING,
    "nothing_left": {"reward/mean": lambda step: min(0.95, 0.1 * step), "grad_norm": lambda step: step < 20},
    "idle_learner": {"idle/learner": 0.9, "idle/engines": 0.1},
    "idle_engines": {"idle/learner": 0.1, "idle/engines": 0.9},
    "idle_both": {"idle/learner": 0.9, "idle/engines": 0.9},
}
COMPANIONS = {"end_token_vanished": {"truncation"}, "nothing_taught": {"zero_variance"}}
"""Rules that hold as well."""


def test_every_rule_is_tried() -> None:
    """`evaluation_falls`, which needs rows of another kind, is tried below."""
    tried = {*BOUNDS, *MOVED, *OTHERS, "evaluation_falls"}
    assert tried == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if isinstance(rule.check, Bound)], ids=lambda rule: rule.name
)
def test_a_bound_is_said_once_with_value_step_cause_and_setting(config: Config, rule: Rule) -> None:
    assert isinstance(rule.check, Bound)
    name, value, _ = BOUNDS[rule.name]
    changes = {name: value} | BESIDE.get(rule.name, {})
    assert run_of(config, rule.check.rows - 1, **changes) == []
    (said,) = run_of(config, rule.check.rows + 45, **changes)
    newest = value(rule.check.rows) if callable(value) else value
    place = f"{name} is {newest:.3g} at optimizer step {rule.check.rows} ({rule.when})"
    assert said.startswith(f"{rule.severity}: {place}. ")
    assert rule.cause.replace("`", "") in said and said.endswith(rule.setting.replace("`", ""))


@pytest.mark.parametrize("rule", BOUNDS)
def test_nothing_is_said_within_a_bound(config: Config, rule: str) -> None:
    name, _, value = BOUNDS[rule]
    assert run_of(config, 45, **{name: value}, **BESIDE.get(rule, {})) == []


@pytest.mark.parametrize("name", [*MOVED, *OTHERS])
def test_trends_and_other_rules_hold_where_they_should(config: Config, name: str) -> None:
    doctor, _ = doctor_of(config, 40, **(MOVED | OTHERS)[name])
    assert set(doctor.findings) == {name} | COMPANIONS.get(name, set())


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if isinstance(rule.check, Trend)], ids=lambda rule: rule.name
)
def test_a_trend_needs_a_window_and_others_that_do_not_rise(config: Config, rule: Rule) -> None:
    changes = MOVED[rule.name]
    assert rule.name not in doctor_of(config, 19, **changes)[0].findings
    for other in rule.metrics[1:]:
        rising = changes | {other: lambda step: 0.1 + 0.01 * step}
        assert rule.name not in doctor_of(config, 40, **rising)[0].findings
    (text,) = [line for line in run_of(config, 40, **changes) if rule.cause.replace("`", "") in line]
    assert all(f"{name} went from " in text for name in (*[*changes][:1], *rule.metrics[1:]))


def test_trends_that_are_small_are_none(config: Config) -> None:
    small = {
        "length/response_mean": lambda step: 10 + 0.1 * step,
        "length/truncated": lambda step: 0.09 * (step > 20),
        "reward/format": lambda step: 0.5 + 0.002 * step,
        "kl/ref": lambda step: 0.01 * step,
        "reward/invalid": lambda step: 0.02 + 0.002 * step,
    }
    assert run_of(config, 40, **small, **{"reward/mean": 0.4}) == []


def test_a_part_that_fell_again_is_not_hacked(config: Config) -> None:
    fell = {"reward/format": lambda step: 0.2 if step < 12 else 0.9 if step < 15 else 0.5}
    assert run_of(config, 45, **fell) == []


def evaluation(step: int, value: float) -> dict[str, Any]:
    name = "eval/sums/pass@1"
    return {"optimizer_step": step, name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}


@pytest.mark.parametrize(
    ("later", "reward", "found"), [(0.3, 0.6, True), (0.45, 0.6, False), (0.3, 0.4, False)]
)
def test_an_evaluation_falls_where_its_interval_does_and_the_reward_rose(
    config: Config, later: float, reward: float, found: bool
) -> None:
    doctor = Doctor(config)
    doctor.see(evaluation(0, 0.2))
    for step in range(1, 31):
        doctor.see(row(step, {"reward/mean": 0.4 if step < 11 else reward}))
        if step in (10, 20, 30):
            new = doctor.see(evaluation(step, 0.6 if step == 10 else later))
            assert bool(new) == (found and step == 20)
    assert ("evaluation_falls" in doctor.findings) == found
    if found:
        finding = doctor.findings["evaluation_falls"]
        assert finding.text.startswith(
            "eval/sums/pass@1 went from 0.6 to 0.3 since its best evaluation while reward/"
        )
        assert (finding.first_step, finding.last_step) == (20, 30)


def test_an_overlapped_run_with_several_epochs_is_one_at_each_of_its_steps() -> None:
    """Only the row of a batch's first epoch says how long engines waited."""
    config = configured("train.epochs=3")
    doctor = Doctor(config)
    for step in range(1, 10):
        doctor.see(row(step, {"idle/engines": 0.1} if step % 3 == 1 else {}))
    assert doctor.history.overlapped and not doctor.history.on_policy


@pytest.mark.parametrize("name", ["loss/clip_fraction_high", "ess/age_0", "ess/age_12"])
def test_a_bound_holds_for_each_of_its_metrics(config: Config, name: str) -> None:
    (said,) = run_of(config, 10, **{name: 0.4})
    assert name in said


def test_tokens_in_the_loss_are_not_judged_where_there_is_none(config: Config) -> None:
    zeros = {"entropy": 0.0, "ratio/mean": 0.0, "ess": 0.0, "ess/age_1": 0.0}
    assert len(run_of(config, 20, **zeros)) == 3
    assert run_of(config, 20, **zeros, sample_utilization=0.0) == []


def test_a_single_bad_row_is_no_reason_where_rows_are_noisy(config: Config) -> None:
    assert run_of(config, 40, **{"length/truncated": lambda step: 0.5 * (step % 5 == 0)}) == []
    assert run_of(config, 40, **{"ratio/mean": lambda step: 0.1 if step % 2 else 5.0}) == []


def test_lockstep_bounds_look_at_the_first_step_of_an_iteration() -> None:
    several = configured("train.optim_batch_size=64", "env.num_envs=32")  # of four steps three are off-policy
    later = {"mismatch/p99": lambda step: 0.5 * (step % 4 != 1), "kl/inference": lambda step: step % 4 != 1}
    later |= {"groups/generated": 8.0}
    assert run_of(several, 40, **later) == []
    first = {"mismatch/p99": lambda step: 0.5 * (step % 4 == 1), "groups/generated": 8.0}
    (said,) = run_of(several, 40, **first)
    assert "mismatch/p99 is 0.5 at optimizer step 5 " in said


def test_lockstep_bounds_are_for_lockstep() -> None:
    ahead = configured("train.max_policy_age=1")
    together = configured("train.max_policy_age=0")
    changes = {"mismatch/p99": 0.5}
    assert run_of(ahead, 20, overlapped=True, **changes) == []
    assert len(run_of(together, 20, overlapped=True, **changes)) == 1


def test_a_solved_task_is_no_worry(config: Config) -> None:
    solved = {
        "reward/mean": lambda step: min(0.95, 0.1 * step),
        "reward/zero_variance_groups": lambda step: 0.3 if step < 20 else 0.95,
        "entropy": lambda step: 0.5 if step < 20 else 0.005,
    }
    assert run_of(config, 200, **solved) == []
    said = run_of(config, 200, **{**solved, "reward/mean": 0.95})  # it was so from the beginning
    assert [line.split()[1] for line in said] == ["entropy", "reward/zero_variance_groups", "reward/mean"]


def test_five_idle_steps_are_said_at_once_and_only_once(config: Config) -> None:
    changes = NOTHING | {"reward/mean": 0.0, "length/truncated": 0.99}
    said = run_of(config, 30, **changes)
    (idle,) = [line for line in said if "taught nothing" in line]
    assert idle.startswith(
        "alarm: optimizer steps 1 to 5 taught nothing. All 32 groups had equal rewards (mean 0.00), 99% of the "
        "answers were cut at 8 tokens. What helps: raise inference_model.max_tokens; "
    )
    assert IDLE_STEPS == 5 and said.index(idle) == 0


def test_four_idle_steps_in_a_row_are_not_said(config: Config) -> None:
    learned = {name: (lambda step: step % 5 == 0) for name in ("advantage/std", "grad_norm")}
    equal = {"reward/zero_variance_groups": lambda step: 0.5 if step % 5 == 0 else 1.0}
    assert run_of(config, 40, **learned, **equal) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward/errors": 0.99, "sample_utilization": 0.0}, "99% of the answers could not be judged"),
        ({"reward/mean": 1.0}, "(mean 1.00). What helps: harder prompts: every answer is right"),
        ({"grad_norm": 0.3}, "only the KL to the reference moved the weights"),
        ({"reward/invalid": 0.9}, "90% of the answers were invalid"),
        ({"grad_norm": float("nan"), "reward/zero_variance_groups": 0.2}, "Gradients were not finite"),
    ],
)
def test_why_steps_teach_nothing(config: Config, changes: dict[str, float], expected: str) -> None:
    said = [line for line in run_of(config, 5, **(NOTHING | changes)) if "taught nothing" in line]
    assert len(said) == 1 and expected in said[0]


def test_a_filter_that_drops_all_is_named() -> None:
    dapo = configured("policy=dapo")
    changes = {"advantage/std": 0.0, "grad_norm": 0.0, "sample_utilization": 0.0}
    (said,) = run_of(dapo, 5, **changes)
    assert "No answer was in the loss. What helps: widen policy.filter_range=[0" in said


def checked(config: Config, rows: list[dict[str, Any]], steps: int | None = None) -> None:
    doctor = Doctor(config)
    doctor.remember(rows)
    doctor.check(len(rows) if steps is None else steps)


def test_a_run_of_which_no_step_taught_anything_is_an_error(config: Config) -> None:
    idle = [row(step, NOTHING | {"reward/mean": 0.0}) for step in (1, 2, 3)]
    with pytest.raises(RunError, match=r"nothing was learned: none of 3 optimizer steps.*All 32 groups"):
        checked(config, idle)
    checked(config, [row(1, {}), *idle])  # one step is enough: the last ones may be a solved task
    checked(config, idle, steps=10)  # the rows of seven steps are lost: nothing is known of them
    checked(config, [], steps=0)


def test_equal_rewards_teach_nothing_whatever_moves_the_weights(config: Config) -> None:
    """With policy.kl_placement=reward advantages differ by the KL alone."""
    only_kl = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.9, "grad_norm": 0.5}
    with pytest.raises(RunError, match="only the KL to the reference moved the weights"):
        checked(config, [row(1, only_kl)])
    checked(config, [row(1, only_kl | {"reward/length": -0.05})])  # lengths were punished differently
    alone = configured("policy.baseline=none", "policy.scale=none")
    checked(alone, [row(1, only_kl | {"advantage/mean": 1.0})])


def test_equal_rewards_are_no_reason_where_a_teacher_teaches() -> None:
    equal = {"reward/zero_variance_groups": 1.0, "advantage/std": 0.0, "groups/duplicates": 1.0}
    for fields in (("policy=opsd",), ("policy=opd", "ref_model.name=teacher", "policy.reward_coef=1")):
        taught = configured(*fields)
        assert run_of(taught, 40, **equal) == []
        checked(taught, [row(step, equal) for step in (1, 2, 3)])
    flat = run_of(configured("policy=opsd"), 60, **equal, **{"reward/mean": 0.4})
    assert flat == []  # rewards are measured alone


def test_a_teacher_that_is_the_policy_teaches_nothing() -> None:
    agreed = NOTHING | {"kl/teacher": 0.0}
    config = configured("policy=opd", "ref_model.name=teacher")
    with pytest.raises(
        RunError, match=r"came from a teacher. The teacher finds every token as likely .*opsd"
    ):
        checked(config, [row(step, agreed) for step in (1, 2, 3)])
    (said,) = run_of(config, 5, **agreed)
    assert "equal rewards" not in said and "taught nothing" in said


def test_a_resumed_run_knows_what_was_said_and_taught_before(config: Config) -> None:
    doctor = Doctor(config)
    doctor.remember([row(step, {"reward/errors": 0.5}) for step in (1, 2, 3)])
    later = [doctor.see(row(step, NOTHING | {"reward/errors": 0.5, "reward/mean": 1.0})) for step in (4, 5)]
    assert later == [[], []]
    doctor.check(5)
