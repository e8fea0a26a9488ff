"""The command behind `run=selftest`."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from plan.machine import this_machine
from selftest.catalogue import CHECKS
from selftest.check import Check, Row
from selftest.report import header, row_lines, table, vllm_build, write
from selftest.runner import Processes, forked, run_checks


def selftest(
    run_dir: Path, checks: Sequence[Check] = CHECKS, processes: Callable[[], Processes] = forked
) -> int:
    """Tries `checks`, prints a line for each as it ends and a table at the end; selftest.json lies in `run_dir`.

    Returns:
        The exit code: 0 where everything that this machine has works, else 1.
    """
    machine, width = this_machine(run_dir), max(len(check.name) for check in checks)
    print(header(machine), flush=True)

    def said(row: Row) -> None:
        print("\n".join(row_lines(row, width)), flush=True)

    rows = run_checks(checks, machine, vllm_build(), said, processes())
    path = write(run_dir, machine, rows)
    wrong = [row for row in rows if row.status == "does not"]
    count = Counter(row.status for row in rows)
    print(f"\nworks: {count['works']}, does not: {count['does not']}, not here: {count['not here']}; {path}")
    if wrong:
        print(f"\n{table(wrong)}")
    return 1 if wrong else 0
