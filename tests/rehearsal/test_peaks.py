"""`run=plan`'s own peak against the rehearsed one, for every shipped config on the machine that its head names."""

import pytest

from benchmarks.plans import configs
from plan.plan import make_plan
from run.rehearsal.report import report, too_large
from run.rehearsal.step import rehearse
from tests.plan.test_plan import config_of, machine
from tests.plan.test_recorded_plans import named_machine

CLOSE = 0.1


@pytest.mark.parametrize("name", sorted(configs()))
def test_the_plan_of_a_shipped_config_is_what_its_step_takes(name: str) -> None:
    plan = make_plan(configs()[name], False, named_machine(name))
    rehearsal = rehearse(plan)
    peak = max(phase.bytes for phase in plan.phases)
    print(
        f"{name}: plan {peak / 2**30:.2f} GiB, rehearsed {rehearsal.peak / 2**30:.2f} in {rehearsal.fullest}"
    )
    assert peak == pytest.approx(rehearsal.peak, rel=CLOSE)
    assert not too_large(plan, rehearsal)
    assert plan.shape is not None
    assert f"{rehearsal.peak / 2**30:.2f} GiB, the peak" in report(plan, plan.shape, rehearsal)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_quickstart_on_a_cpu(ranks: int) -> None:
    config = config_of("grpo_quickstart", f"train_model.num_devices={ranks}")
    plan = make_plan(config, False, machine(0))
    peak = max(phase.bytes for phase in plan.phases)
    assert peak == pytest.approx(rehearse(plan).peak, rel=CLOSE)
