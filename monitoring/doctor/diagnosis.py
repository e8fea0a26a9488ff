"""What the doctor finds in a run's folder, of a run that is over or that goes on."""

from dataclasses import dataclass
from pathlib import Path

from config.saved_settings import METRICS, saved_config
from monitoring.doctor.doctor import Doctor
from monitoring.doctor.rule import Finding
from monitoring.metrics_file import MetricsFile

_ORDER = {"alarm": 0, "warning": 1, "info": 2}


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
    for row in rows:
        doctor.see(row)
    found = sorted(doctor.findings.values(), key=lambda finding: _ORDER[finding.severity])
    steps = doctor.history.seen
    return Diagnosis(found, steps, len(rows) - steps)


def diagnose(run_dir: Path) -> list[Finding]:
    """The findings of `diagnosis`, alarms first."""
    return diagnosis(run_dir).findings
