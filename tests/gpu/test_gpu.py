"""What needs GPUs: the bodies are those of `run=selftest`, and some longer ones. Each runs in a process of its own."""

from functools import cache

import pytest

from plan.machine import this_machine
from selftest.catalogue import CHECKS
from selftest.check import Check
from selftest.report import vllm_build
from selftest.runner import forked, run_check
from tests.gpu.longer import EXTRA
from tests.scripts import ROOT

server = cache(forked)
"""Of all checks: it imports everything, which is worth it where there is something to check."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check", [check for check in (*CHECKS, *EXTRA) if check.gpus], ids=lambda check: check.name
)
def test_on_gpus(check: Check) -> None:
    lacking = check.missing(this_machine(ROOT), vllm_build())
    if lacking is not None:
        pytest.skip(lacking)
    row = run_check(check, server(), check.seconds)
    assert row.status == "works", f"{row.detail}\n{row.trace}"
    print(row.detail)
