"""GPU checks of the self-test and longer ones, each in a process of its own."""

import pytest

from tests.gpu.long_gpu_checks import EXTRA
from tests.script_runner import ROOT
from torchgrpo.plan.machine import this_machine
from torchgrpo.selftest.catalogue import CHECKS
from torchgrpo.selftest.check import Check
from torchgrpo.selftest.main import vllm_build
from torchgrpo.selftest.runner import run_group


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check for check in (*CHECKS, *EXTRA) if check.gpus], ids=lambda check: check.name)
def test_on_gpus(check: Check) -> None:
    missing_requirement = check.missing_requirement(this_machine(ROOT), vllm_build())
    if missing_requirement is not None:
        pytest.skip(missing_requirement)
    (row,) = run_group([check])
    assert row.status == "passed", f"{row.detail}\n{row.trace}"
    print(row.detail)
