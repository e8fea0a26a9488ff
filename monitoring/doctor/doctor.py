"""The doctor: reports each problem in the metrics once, with cause and remedy.

    row ──▶ History ──▶ each of RULES ──▶ Finding, the first time that a rule holds

A run does this after every optimizer step and evaluation, `diagnose` (diagnosis.py) with the rows of a folder: it is
the same code and finds the same.
"""

from collections.abc import Iterable
from dataclasses import replace

from config.errors import RunError
from config.schema import Config
from monitoring.doctor.bounds import BOUNDS
from monitoring.doctor.history import History, Row
from monitoring.doctor.idle import IDLE, explanation
from monitoring.doctor.rule import Finding, Rule
from monitoring.doctor.trends import EVALUATIONS, TRENDS

OF_STEPS = (*IDLE, *BOUNDS, *TRENDS)
RULES = (*OF_STEPS, *EVALUATIONS)


class Doctor:
    """Sees the rows of one run. findings: by the name of their rule, in the order in which they came."""

    def __init__(self, config: Config) -> None:
        self.history = History(config)
        self.findings: dict[str, Finding] = {}

    def remember(self, rows: Iterable[Row]) -> None:
        """Take up rows from before a resume; their findings are not reported again."""
        for row in rows:
            self.see(row)

    def see(self, row: Row) -> list[Finding]:
        """New findings after one more row, of an optimizer step or of an evaluation."""
        if "reward/mean" in row:
            self.history.take(row)
            return self._found(OF_STEPS, row["optimizer_step"])
        self.history.take_evaluation(row)
        return self._found(EVALUATIONS, row["optimizer_step"])

    def _found(self, rules: tuple[Rule, ...], step: int) -> list[Finding]:
        new = []
        for rule in rules:
            seen = rule.look(self.history)
            if seen is None:
                continue
            known = self.findings.get(rule.name)
            if known is not None:
                self.findings[rule.name] = replace(known, last_step=step)
                continue
            cause, knob = seen.cause or rule.cause, (seen.knob or rule.knob).replace("`", "")
            found = Finding(rule.name, rule.severity, step, step, seen.text, cause.replace("`", ""), knob)
            self.findings[rule.name] = found
            new.append(found)
        return new

    def check(self, optimizer_steps: int) -> None:
        """The end of a run.

        optimizer_steps: of the whole run; where rows of earlier parts are lost, nothing can be said.

        Raises:
            RunError: no step of the run taught anything.
        """
        history = self.history
        if history.taught or not history.seen or history.seen < optimizer_steps:
            return
        why, helps = explanation(list(history.idle), history.config)
        source = "a teacher" if history.config.policy.distill_coef != 0 else "rewards"
        raise RunError(
            f"nothing was learned: none of {history.seen} optimizer steps had a gradient that came from {source}. "
            f"{why}. What helps: {helps}"
        )
