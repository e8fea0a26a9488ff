"""Rules over what a run logs, each with a likely cause and the setting that helps; live, and for a folder."""

from monitoring.doctor.diagnosis import diagnose
from monitoring.doctor.rule import Finding

__all__ = ["Finding", "diagnose"]
