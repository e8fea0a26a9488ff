"""The generator of the table in docs/doctor.md: every rule of the doctor.

python -m tests.rules --write
"""

import sys
from pathlib import Path

from monitoring.doctor.doctor import RULES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "doctor.md"
BEGIN, END = "<!-- rules: python -m tests.rules --write -->", "<!-- end of the rules -->"


def table() -> str:
    """Markdown: a row a rule, alarms first."""
    order = ("alarm", "warning", "info")
    lines = ["| rule | severity | metrics | when | likely cause | what helps |", "|---|---|---|---|---|---|"]
    for rule in sorted(RULES, key=lambda rule: order.index(rule.severity)):
        metrics = ", ".join(f"`{name}`" for name in rule.metrics)
        cells = (f"`{rule.name}`", rule.severity, metrics, rule.when, rule.cause, rule.knob)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(table())
