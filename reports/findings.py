"""What the doctor says of a run, for a report."""

from pathlib import Path
from typing import Any

from monitoring.doctor import diagnose


def findings_of(run_dir: Path) -> list[dict[str, Any]]:
    """One for each finding, the most severe first, as the doctor orders them."""
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity,
            "first": finding.first_step,
            "last": finding.last_step,
            "text": finding.text,
            "cause": finding.cause,
            "knob": finding.knob,
        }
        for finding in diagnose(run_dir)
    ]
