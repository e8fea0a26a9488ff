"""What `run=plan` says of the shipped configs, from one card of 24 GiB to 64 of 80 GiB: as docs/plans.md has it."""

from benchmarks.plans import BEGIN, END, PAGE, rows


def test_the_plans_of_the_shipped_configs_are_those_on_the_page() -> None:
    recorded = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert recorded == list(rows()), (
        "if the change is meant: python benchmarks/plans.py --write, and look at it"
    )
