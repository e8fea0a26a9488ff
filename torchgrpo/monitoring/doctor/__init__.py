"""Rules over what a run logs, each with a likely cause and the setting that helps; live, and for a folder."""

from torchgrpo.monitoring.doctor.doctor import Finding, diagnose

__all__ = ["Finding", "diagnose"]
