"""What the doctor says of a run, for a report."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from monitoring.doctor import diagnose


def findings_of(run_dir: Path) -> dict[str, Any]:
    """{"found": one for each finding, alarms first; "unknown": why the doctor could not look, or empty}."""
    try:
        return {"found": [asdict(finding) for finding in diagnose(run_dir)], "unknown": ""}
    except ConfigError as error:  # settings of another version
        return {"found": [], "unknown": str(error).splitlines()[0]}
