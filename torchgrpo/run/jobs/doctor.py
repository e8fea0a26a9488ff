"""The job `run=doctor run_dir=RUN`: what is worth worrying about in a run that is over, or that goes on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from config.cli.saved_settings import chosen_run
from config.run_folder.folders import remove_if_unused
from config.schema.errors import RunOutcome
from torchgrpo.monitoring.doctor.doctor import Finding, diagnosis
from torchgrpo.monitoring.doctor.rules import RULES
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.monitoring.repetition import holds_question
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    remove_if_unused(job.run_dir)
    print(examine(chosen_run(job.config.run_dir)), flush=True)
    return "finished"


Record = dict[str, Any]
"""A line of the ledger."""
_LONGEST = 160
"""Characters of a text that are shown."""


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
    shown = _examples(run_dir, found.findings)
    told = [looked_at]
    for finding in found.findings:
        first, last = finding.first_step, finding.last_step
        when = f"optimizer step {first}" if first == last else f"optimizer steps {first} to {last}"
        lines = [
            f"{finding.severity}: {finding.rule}, {when}",
            finding.text,
            f"likely cause: {finding.cause}",
        ]
        lines += [f"for example: {shown[finding.rule]}"] if finding.rule in shown else []
        told.append("\n  ".join([*lines, f"what helps: {finding.setting}"]))
    return "\n\n".join(told)


def _examples(run_dir: Path, findings: Sequence[Finding]) -> dict[str, str]:
    """The first completion between its steps that shows what a rule found, by the rule's name, if there is one."""
    wanted = {finding.rule: finding for finding in findings if finding.rule in _SHOWS}
    shown: dict[str, str] = {}
    for record in read_records(run_dir, "train") if wanted else ():
        for name, finding in wanted.items():
            within = any(
                finding.first_step <= step <= finding.last_step for step in record["optimizer_steps"]
            )
            if name in shown or not within:
                continue
            one = next((one for one in record["completions"] if _SHOWS[name](record, one)), None)
            if one is not None:
                asked, verdict = _short(record["messages"][-1]["content"]), one["verdict"]
                parts = "".join(f", {part} {value:.3g}" for part, value in verdict["parts"].items())
                shown[name] = (
                    f"group {record['group_id']}, {asked}: {_short(one['text'])} ({one['finish_reason']}, "
                    f"reward {verdict['score']:.3g}{parts})"
                )
        if len(shown) == len(wanted):
            break
    return shown


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")


def _is_cut(record: Record, one: Record) -> bool:
    return bool(one["finish_reason"] == "length")


def _is_wrong_and_paid(record: Record, one: Record) -> bool:
    return bool(one["verdict"]["success"] < 1 and one["verdict"]["score"] > 0)


_SHOWS: dict[str, Callable[[Record, Record], bool]] = {
    "duplicated_completions": lambda record, one: (
        [other["text"] for other in record["completions"]].count(one["text"]) > 1
    ),
    "repeats_question": lambda record, one: holds_question(record["messages"][-1]["content"], one["text"]),
    "reward_errors": lambda record, one: one["verdict"]["outcome"] == "error",
    "truncation": _is_cut,
    "end_token_vanished": _is_cut,
    "part_hacked": _is_wrong_and_paid,
    "evaluation_falls": _is_wrong_and_paid,
}
