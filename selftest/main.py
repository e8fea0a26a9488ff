"""The command behind `run=selftest`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from plan.machine import this_machine
from selftest.catalogue import CHECKS
from selftest.check import Check, Status
from selftest.report import header, row_lines, table, vllm_build, write
from selftest.runner import run_checks


def selftest(run_dir: Path, checks: Sequence[Check] = CHECKS) -> int:
    """Tries `checks`, prints a line for each as it ends, and writes selftest.json in `run_dir`.

    Returns:
        The exit code: 1 where something does not work, else 0.
    """
    machine, width = this_machine(run_dir), max(len(check.name) for check in checks)
    print(header(machine), flush=True)
    rows = []
    for row in run_checks(checks, machine, vllm_build()):
        print("\n".join(row_lines(row, width)), flush=True)
        rows.append(row)
    path = write(run_dir, machine, rows)
    wrong = [row for row in rows if row.status == "does not"]
    count = Counter(row.status for row in rows)
    print(f"\n{', '.join(f'{status}: {count[status]}' for status in get_args(Status))}; {path}")
    if wrong:
        print(f"\n{table(wrong)}")
    return 1 if wrong else 0
