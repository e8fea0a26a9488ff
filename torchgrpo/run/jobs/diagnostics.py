"""Job `run=diagnostics`: prints the findings about a run's folder, with example completions.

`run_dir=RUN` names the folder of a finished or running run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from config.cli.saved_settings import chosen_run
from config.run_folder.folders import remove_unused_folder
from config.schema.errors import RunOutcome
from torchgrpo.monitoring.completion_record import parse_turns
from torchgrpo.monitoring.diagnostics.diagnostics import Finding, diagnose_folder
from torchgrpo.monitoring.diagnostics.rules import RULES
from torchgrpo.monitoring.ledger_storage import read_records
from torchgrpo.monitoring.repetition import contains_question
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    remove_unused_folder(job.run_dir)
    print(format_diagnosis(chosen_run(job.config.run_dir)), flush=True)
    return "finished"


Record = dict[str, Any]
"""Line of the ledger, or one of its completions."""
_MAX_EXAMPLE_CHARS = 160
"""Maximum of characters that are shown of a text."""


def format_diagnosis(run_dir: Path) -> str:
    """Returns the findings of a run's folder as text.

    Raises:
        ConfigError: the folder holds no settings of a run, or those of another version of this code.
    """
    found = diagnose_folder(run_dir)
    counted = f"{len(RULES)} rules over {found.steps} optimizer steps and {found.evaluations} evaluations"
    scope = f"{counted} of {run_dir}"
    if not found.findings:
        return f"no findings: {scope}"
    examples = _find_examples(run_dir, found.findings)
    paragraphs = [scope]
    for finding in found.findings:
        first, last = finding.first_step, finding.last_step
        when = f"optimizer step {first}" if first == last else f"optimizer steps {first} to {last}"
        lines = [f"{finding.severity}: {finding.rule}, {when}", finding.text, f"likely cause: {finding.cause}"]
        lines += [f"for example: {examples[finding.rule]}"] if finding.rule in examples else []
        paragraphs.append("\n  ".join([*lines, f"remedy: {finding.setting}"]))
    return "\n\n".join(paragraphs)


def _find_examples(run_dir: Path, findings: Sequence[Finding]) -> dict[str, str]:
    """Returns for each rule the first completion that illustrates it, as text.

    The completion comes from the steps of the finding.
    """
    illustrated = {finding.rule: finding for finding in findings if finding.rule in _EXAMPLE_TESTS}
    examples: dict[str, str] = {}
    for record in read_records(run_dir, "train") if illustrated else ():
        for name, finding in illustrated.items():
            is_in_range = any(finding.first_step <= step <= finding.last_step for step in record["optimizer_steps"])
            if name in examples or not is_in_range:
                continue
            matches = (item for item in record["completions"] if _EXAMPLE_TESTS[name](record, item))
            completion = next(matches, None)
            if completion is not None:
                prompt, verdict = _shorten(record["messages"][-1]["content"]), completion["verdict"]
                components = "".join(f", {name} {value:.3g}" for name, value in verdict["components"].items())
                text = _shorten(completion["error"] or completion["text"])
                examples[name] = (
                    f"group {record['group_id']}, {prompt}: {text} "
                    f"({completion['finish_reason']}, "
                    f"reward {verdict['score']:.3g}{components})"
                )
        if len(examples) == len(illustrated):
            break
    return examples


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _MAX_EXAMPLE_CHARS else f"{text[:_MAX_EXAMPLE_CHARS]} ...")


def _is_truncated(record: Record, completion: Record) -> bool:
    return bool(completion["finish_reason"] == "length")


def _is_wrong_and_rewarded(record: Record, completion: Record) -> bool:
    return bool(completion["verdict"]["success"] < 1 and completion["verdict"]["score"] > 0)


def _has_malformed_call(record: Record, completion: Record) -> bool:
    return any("malformed" in turn.tool_outcomes for turn in parse_turns(completion))


_EXAMPLE_TESTS: dict[str, Callable[[Record, Record], bool]] = {
    "duplicate_completions": lambda record, completion: (
        [other["text"] for other in record["completions"]].count(completion["text"]) > 1
    ),
    "prompt_echo": lambda record, completion: contains_question(record["messages"][-1]["content"], completion["text"]),
    "reward_errors": lambda record, completion: completion["verdict"]["outcome"] == "error",
    "environment_errors": lambda record, completion: completion["finish_reason"] == "error",
    "episode_deadline": lambda record, completion: completion["finish_reason"] == "deadline",
    "malformed_calls": _has_malformed_call,
    "history_rewritten": lambda record, completion: len(completion["sequence_starts"]) > 1,
    "truncation": _is_truncated,
    "missing_end_token": _is_truncated,
    "component_hacked": _is_wrong_and_rewarded,
    "evaluation_drop": _is_wrong_and_rewarded,
}
