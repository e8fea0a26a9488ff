"""The job `run=rewards`, which grades saved completions: `python grpo.py run=rewards env.dataset=... env.samples=FILE`.

FILE is JSONL of {"row": index in the data file, "completion": text}, optionally with `num_tokens` and `truncated`.
Each gives one JSON line on standard output, in the order of FILE; a table follows on standard error.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from config.run_folder.folders import remove_if_unused
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError, RunOutcome
from config.schema.models import ModelConfig
from envs.group import Verdict
from envs.judging.lowest_scores import LowestScores, at_most
from envs.judging.service import RewardService
from envs.row_files import local_rows, shown
from envs.task import Completion, Example, checked_examples, make_task
from torchgrpo.plan.model_shape import find_file
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    code = run_rewards(job.config.env, model=job.config.model)
    remove_if_unused(job.run_dir)
    if code:
        sys.exit(code)
    return "finished"


PORTION = 512


def run_rewards(
    env: EnvConfig, out: TextIO = sys.stdout, report: TextIO = sys.stderr, model: ModelConfig | None = None
) -> int:
    """Exit code: 0, or 1 where more verifications failed than `env.max_error_rate` allows.

    model: its chat template says what prompts hold of the answer; None: nothing but `Example.prefill`.

    Raises:
        ConfigError: no samples, a malformed line, a row that is not in the data.
    """
    if env.samples is None:
        raise ConfigError('run=rewards needs env.samples=FILE, JSONL of {"row": index, "completion": text}')
    task = make_task(env)
    examples = {example.row: example for example in checked_examples(task, env.split)}
    if not examples:
        raise ConfigError("the dataset has no rows: check env.data_files and env.split")
    path = Path(env.samples)
    if not path.exists() or path.is_dir():
        raise ConfigError(f"env.samples={path}: no such file (looked from {Path.cwd()})")
    samples = [_sample(value, place, examples) for value, place in local_rows(path)]
    if not samples:
        raise ConfigError(f"env.samples={env.samples}: the file has no lines")
    prefill = _prefill_reader(model, report)
    samples = [(_with_prefill(completion, prefill(example)), example) for completion, example in samples]
    service = RewardService(task, replace(env, max_error_rate=1.0))
    try:
        graded: list[Verdict] = []
        lowest = LowestScores()
        for start in range(0, len(samples), PORTION):
            portion = samples[start : start + PORTION]
            completions, of_portion = zip(*portion, strict=True)
            verdicts = _with_lowest(lowest, of_portion, service.score(completions, of_portion))
            for (_, example), verdict in zip(portion, verdicts, strict=True):
                line = {
                    "row": example.row,
                    "score": verdict.score,
                    "outcome": verdict.outcome,
                    "parts": verdict.parts,
                    "seconds": round(verdict.seconds, 6),
                }
                print(json.dumps(line), file=out, flush=True)
            graded += verdicts
        errors = sum(verdict.outcome == "error" for verdict in graded)
        _print_table(graded, report)
        if errors:
            print(f"last error: {service.last_error}", file=report)
        return int(errors / len(graded) > env.max_error_rate)
    finally:
        service.close()


def _prefill_reader(model: ModelConfig | None, report: TextIO) -> Callable[[Example], str]:
    """Says what the prompt of an example holds of its answer."""
    if model is None:
        return lambda example: example.prefill
    from envs.chat import answer_prefill
    from envs.chat_template import render_prompt
    from torchgrpo.training.model_loading import load_tokenizer

    try:
        if find_file(model.name) is None:
            raise ConfigError(f"model.name={model.name} is not on this machine")
        tokenizer = load_tokenizer(model)
    except ConfigError as error:
        print(f"{error}: a thought that its chat template opens is not known to the reward", file=report)
        return lambda example: example.prefill
    return lambda example: answer_prefill(render_prompt(tokenizer, example), example.prefill)


def _with_prefill(completion: Completion, prefill: str) -> Completion:
    """Add an open thought to a sample that closes one and opens none."""
    closed = completion.text.find("</think>")
    if closed >= 0 and "<think>" not in prefill + completion.text[:closed]:
        prefill += "<think>"
    return replace(completion, prefill=prefill)


def _with_lowest(
    lowest: LowestScores, examples: Sequence[Example], verdicts: Sequence[Verdict]
) -> list[Verdict]:
    """Verdicts of a portion, in which the completions of one row are a group."""
    groups: dict[tuple[str, int], list[Verdict]] = {}
    for example, verdict in zip(examples, verdicts, strict=True):
        groups.setdefault((example.source, example.row), []).append(verdict)
    for (source, _), group in groups.items():
        lowest.take(source, group)
    floors = {key: lowest.lowest(key[0], group) for key, group in groups.items()}
    return [
        at_most(verdict, floors[example.source, example.row])
        for example, verdict in zip(examples, verdicts, strict=True)
    ]


def _sample(value: dict[str, Any], place: str, examples: dict[int, Example]) -> tuple[Completion, Example]:
    if not isinstance(value.get("completion"), str):
        raise ConfigError(
            f'{place}: a sample is {{"row": index, "completion": text}}, this is {shown(value)}'
        )
    row = value.get("row")
    if type(row) is not int or row not in examples:
        raise ConfigError(
            f"{place}: row {shown(row)} is not among the {len(examples)} prompts (rows {min(examples)} to "
            f"{max(examples)}); rows are counted from 0 in the data file"
        )
    num_tokens, truncated = value.get("num_tokens", 0), value.get("truncated", False)
    if type(num_tokens) is not int or type(truncated) is not bool:
        raise ConfigError(
            f"{place}: num_tokens={shown(num_tokens)}, truncated={shown(truncated)}: a whole number, and true or false"
        )
    return Completion(value["completion"], num_tokens, truncated), examples[row]


def _print_table(graded: Sequence[Verdict], report: TextIO) -> None:
    outcomes = Counter(verdict.outcome for verdict in graded)
    judged = [verdict for verdict in graded if verdict.outcome != "error"]
    seconds = sorted(verdict.seconds for verdict in graded)
    lines = [("completions", f"{len(graded)}")]
    lines += [(name, f"{outcomes[name]}") for name in ("scored", "invalid", "error")]
    if judged:
        lines.append(("mean score", f"{statistics.fmean(verdict.score for verdict in judged):.4f}"))
    names = sorted({name for verdict in judged for name in verdict.parts})
    lines += [
        (f"mean {name}", f"{statistics.fmean(v.parts.get(name, 0.0) for v in judged):.4f}") for name in names
    ]
    lines += [
        (f"seconds p{share}", f"{seconds[min(len(seconds) - 1, len(seconds) * share // 100)]:.6f}")
        for share in (50, 95, 99)
    ]
    lines.append(("seconds max", f"{seconds[-1]:.6f}"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value:>12}", file=report)
