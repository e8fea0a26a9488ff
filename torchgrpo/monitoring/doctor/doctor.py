"""The doctor: reports each problem in the metrics once, with cause and remedy.

    row ──▶ History ──▶ each of RULES ──▶ Finding, the first time that a rule holds

A run does this after every optimizer step and evaluation, `diagnose` with the rows of a folder: it is the same code and
finds the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from config.cli.saved_settings import METRICS, saved_config
from config.schema.config import Config
from config.schema.errors import RunError
from torchgrpo.monitoring.doctor.history import History, Row, explanation
from torchgrpo.monitoring.doctor.rules import RULES, Severity
from torchgrpo.monitoring.metrics_file import MetricsFile

_OF_EVALUATIONS = [rule for rule in RULES if rule.metrics[0].startswith("eval/")]
_OF_STEPS = [rule for rule in RULES if rule not in _OF_EVALUATIONS]


@dataclass(frozen=True)
class Finding:
    """A rule that held. first_step, last_step: the optimizer steps at which it did so first and last."""

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    text: str
    cause: str
    setting: str

    @property
    def line(self) -> str:
        return f"{self.severity}: {self.text}. {self.cause}. What helps: {self.setting}"


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
        of_step, step = "reward/mean" in row, row["optimizer_step"]
        if of_step:
            self.history.take(row)
        else:
            self.history.take_evaluation(row)
        new = []
        for rule in _OF_STEPS if of_step else _OF_EVALUATIONS:
            seen = rule.look(self.history)
            if seen is None:
                continue
            known = self.findings.get(rule.name)
            if known is not None:
                self.findings[rule.name] = replace(known, last_step=step)
                continue
            cause, setting = seen.cause or rule.cause, (seen.setting or rule.setting).replace("`", "")
            found = Finding(rule.name, rule.severity, step, step, seen.text, cause.replace("`", ""), setting)
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


@dataclass(frozen=True)
class Diagnosis:
    """findings: alarms first, then in the order in which they came. steps, evaluations: rows that were looked at."""

    findings: list[Finding]
    steps: int
    evaluations: int


def diagnosis(run_dir: Path) -> Diagnosis:
    """Look at every row of a run's metrics.

    Raises:
        ConfigError: the folder holds no settings of a run, or those of another version of this code.
    """
    doctor = Doctor(saved_config(run_dir))
    rows = MetricsFile(run_dir / METRICS).rows()
    doctor.remember(rows)
    found = sorted(doctor.findings.values(), key=lambda finding: get_args(Severity).index(finding.severity))
    steps = doctor.history.seen
    return Diagnosis(found, steps, len(rows) - steps)


def diagnose(run_dir: Path) -> list[Finding]:
    """The findings of `diagnosis`, alarms first."""
    return diagnosis(run_dir).findings
