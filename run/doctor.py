"""The job `run=doctor run_dir=RUN`: what is worth worrying about in a run that is over, or that goes on."""

from pathlib import Path

from monitoring.doctor.diagnosis import diagnosis
from monitoring.doctor.doctor import RULES
from monitoring.doctor.examples import examples
from monitoring.doctor.rule import Finding


def examine(run_dir: Path) -> str:
    """The findings of a run's folder, for a person.

    Raises:
        ConfigError: the folder holds no settings of a run, or those of another version of this code.
    """
    found = diagnosis(run_dir)
    counted = f"{len(RULES)} rules over {found.steps} optimizer steps and {found.evaluations} evaluations"
    looked_at = f"{counted} of {run_dir}"
    if not found.findings:
        return f"nothing to worry about: {looked_at}"
    shown = examples(run_dir, found.findings)
    told = [_told(finding, shown.get(finding.rule)) for finding in found.findings]
    return "\n\n".join([looked_at, *told])


def _told(finding: Finding, example: str | None) -> str:
    first, last = finding.first_step, finding.last_step
    when = f"optimizer step {first}" if first == last else f"optimizer steps {first} to {last}"
    lines = [f"{finding.severity}: {finding.rule}, {when}", finding.text, f"likely cause: {finding.cause}"]
    lines += [] if example is None else [f"for example: {example}"]
    return "\n  ".join([*lines, f"what helps: {finding.knob}"])
