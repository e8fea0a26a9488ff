"""Checks of `run=selftest` that need GPUs, and longer ones, each in a process of its own."""

import pytest

from plan.machine import this_machine
from selftest.catalogue import CHECKS
from selftest.check import Check
from selftest.main import vllm_build
from selftest.runner import run_group
from tests.gpu.longer import EXTRA
from tests.scripts import ROOT


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", [check for check in (*CHECKS, *EXTRA) if check.gpus], ids=lambda check: check.name
)
def test_on_gpus(check: Check) -> None:
    lacking = check.missing(this_machine(ROOT), vllm_build())
    if lacking is not None:
        pytest.skip(lacking)
    (row,) = run_group([check])
    assert row.status == "works", f"{row.detail}\n{row.trace}"
    print(row.detail)
