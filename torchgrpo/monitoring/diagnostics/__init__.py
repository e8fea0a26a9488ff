"""Diagnostics: rules over the metrics of a run, with likely causes and settings that help."""

from torchgrpo.monitoring.diagnostics.diagnostics import Finding, diagnose

__all__ = ["Finding", "diagnose"]
