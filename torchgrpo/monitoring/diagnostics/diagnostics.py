"""Diagnostics of a run: reports each problem in the metrics once, with cause and remedy.

    row ──▶ MetricHistory ──▶ each rule of RULES ──▶ Finding, the first time that the rule holds

A run checks the rules after each optimizer step and each evaluation. `diagnose` applies the same code to the
rows of a run's folder.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from config.cli.saved_settings import METRICS, saved_config
from config.schema.config import Config
from config.schema.errors import RunError
from torchgrpo.monitoring.diagnostics.metric_history import MetricHistory, Row, explain_missing_gradient
from torchgrpo.monitoring.diagnostics.rule import Severity
from torchgrpo.monitoring.diagnostics.rules import RULES
from torchgrpo.monitoring.metrics_file import MetricsFile

_EVALUATION_RULES = [rule for rule in RULES if rule.metrics[0].startswith("eval/")]
_STEP_RULES = [rule for rule in RULES if rule not in _EVALUATION_RULES]


@dataclass(frozen=True)
class Finding:
    """Rule that held, with its observation.

    first_step, last_step: first and last optimizer step at which the rule held.
    """

    rule: str
    severity: Severity
    first_step: int
    last_step: int
    text: str
    cause: str
    setting: str

    @property
    def line(self) -> str:
        return f"{self.severity}: {self.text}. {self.cause}. Remedy: {self.setting}"


class Diagnostics:
    """Checks the rows of one run against all rules.

    findings: findings by the name of their rule, in order of appearance.
    """

    def __init__(self, config: Config) -> None:
        self.history = MetricHistory(config)
        self.findings: dict[str, Finding] = {}

    def add_past_rows(self, rows: Iterable[Row]) -> None:
        """Adds the rows from before a resume; their findings are not reported again."""
        for row in rows:
            self.check_row(row)

    def check_row(self, row: Row) -> list[Finding]:
        """Adds the row of an optimizer step or an evaluation and returns new findings."""
        is_step_row, step = "reward/mean" in row, row["optimizer_step"]
        if is_step_row:
            self.history.add_step_row(row)
        else:
            self.history.add_evaluation_row(row)
        new_findings = []
        for rule in _STEP_RULES if is_step_row else _EVALUATION_RULES:
            observation = rule.evaluate(self.history)
            if observation is None:
                continue
            finding = self.findings.get(rule.name)
            if finding is not None:
                self.findings[rule.name] = replace(finding, last_step=step)
                continue
            cause = (observation.cause or rule.cause).replace("`", "")
            setting = (observation.setting or rule.setting).replace("`", "")
            finding = Finding(rule.name, rule.severity, step, step, observation.text, cause, setting)
            self.findings[rule.name] = finding
            new_findings.append(finding)
        return new_findings

    def check_gradients(self, optimizer_steps: int) -> None:
        """Fails a finished run in which no optimizer step had a gradient.

        optimizer_steps: steps of the whole run. If earlier rows are missing, the check is skipped.

        Raises:
            RunError: no optimizer step had a gradient from rewards or a teacher.
        """
        history = self.history
        if history.num_gradient_steps or not history.num_steps or history.num_steps < optimizer_steps:
            return
        cause, remedy = explain_missing_gradient(list(history.no_gradient_rows), history.config)
        source = "a teacher" if history.config.policy.distill_coef != 0 else "rewards"
        raise RunError(
            f"nothing was learned: none of {history.num_steps} optimizer steps had a gradient that came from "
            f"{source}. {cause}. Remedy: {remedy}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """Findings in a run's folder, alarms first, then in order of appearance.

    steps, evaluations: number of checked rows of each kind.
    """

    findings: list[Finding]
    steps: int
    evaluations: int


def diagnose_folder(run_dir: Path) -> Diagnosis:
    """Checks all rows of metrics in a run's folder.

    Raises:
        ConfigError: the folder has no settings of a run, or settings of another version of this code.
    """
    diagnostics = Diagnostics(saved_config(run_dir))
    rows = MetricsFile(run_dir / METRICS).read_rows()
    diagnostics.add_past_rows(rows)
    findings = sorted(diagnostics.findings.values(), key=lambda finding: get_args(Severity).index(finding.severity))
    steps = diagnostics.history.num_steps
    return Diagnosis(findings, steps, len(rows) - steps)


def diagnose(run_dir: Path) -> list[Finding]:
    """Returns the findings of `diagnose_folder`, alarms first."""
    return diagnose_folder(run_dir).findings
