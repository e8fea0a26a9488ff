"""Job `run=rewards`: scores saved completions and prints the rewards.

    python grpo.py run=rewards env.dataset=... rewards.completions=FILE
    python grpo.py run=rewards env.dataset=... rewards.completions=RUN

FILE is JSONL of {"row": index in the data file, "completion": text}, optionally with `num_tokens`, `truncated` and the
`messages` of all turns. RUN is a run's folder, whose completions for training are scored again. Each completion gives
one JSON line on standard output, in their order; a table follows on standard error.
"""

import asyncio
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from config.run_folder.folders import remove_unused_folder
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError, RunOutcome
from config.schema.jobs import RewardsConfig
from config.schema.models import ModelConfig
from envs.group import Verdict
from envs.reward_workers.minimum_scores import MinimumScores, lower_invalid_score
from envs.reward_workers.service import RewardService
from envs.rewards import model_reward_names
from envs.row_files import format_value, local_rows
from envs.task import Completion, Example, Task, load_examples, make_task
from torchgrpo.monitoring.completion_record import parse_reward_input
from torchgrpo.monitoring.ledger_storage import ledger_files, read_records
from torchgrpo.plan.model_shape import find_config_file
from torchgrpo.run.job import Job

if TYPE_CHECKING:  # torch costs seconds
    from torchgrpo.rollout.model_rewards.model_rewards import ModelRewards


def run(job: Job[Any]) -> RunOutcome:
    code = score_completions(job.config.env, job.config.rewards, model=job.config.model)
    remove_unused_folder(job.run_dir)
    if code:
        sys.exit(code)
    return "finished"


CHUNK_SIZE = 512


def score_completions(
    env: EnvConfig,
    rewards: RewardsConfig,
    out: TextIO = sys.stdout,
    report: TextIO = sys.stderr,
    model: ModelConfig | None = None,
) -> int:
    """Scores saved completions, and prints a line for each and a table.

    Returns the exit code: 0, or 1 where more rewards failed than `env.max_error_rate` allows.

    model: its chat template decides which part of the answer the prompt already holds; None: only `Example.prefill`.

    Raises:
        ConfigError: there are no completions, a line is malformed, or a row is not in the data.
    """
    if rewards.completions is None:
        raise ConfigError('run=rewards needs rewards.completions=FILE, JSONL of {"row": index, "completion": text}')
    task = make_task(env)
    examples = {example.row: example for example in load_examples(task, env.split)}
    if not examples:
        raise ConfigError("the dataset has no rows: check env.data_files and env.split")
    path = Path(rewards.completions)
    if not path.exists():
        raise ConfigError(f"rewards.completions={path}: no such file (looked from {Path.cwd()})")
    if path.is_dir():
        samples = _read_ledger(path, examples)
    else:
        prefill = _prefill_reader(model, report)
        samples = [_parse_sample(value, location, examples) for value, location in local_rows(path)]
        samples = [(_with_prefill(completion, prefill(example)), example) for completion, example in samples]
    if not samples:
        raise ConfigError(
            f"rewards.completions={rewards.completions}: the file has no lines; write one sample per line"
        )
    with closing(_ChunkScorer(task, replace(env, max_error_rate=1.0))) as scorer:
        all_verdicts: list[Verdict] = []
        lowest = MinimumScores()
        for start in range(0, len(samples), CHUNK_SIZE):
            chunk = samples[start : start + CHUNK_SIZE]
            completions, chunk_examples = zip(*chunk, strict=True)
            verdicts = _with_lowest(lowest, chunk_examples, scorer.score(completions, chunk_examples))
            for (_, example), verdict in zip(chunk, verdicts, strict=True):
                line = {
                    "row": example.row,
                    "score": verdict.score,
                    "outcome": verdict.outcome,
                    "components": verdict.components,
                    "seconds": round(verdict.seconds, 6),
                }
                print(json.dumps(line), file=out, flush=True)
            all_verdicts += verdicts
        errors = sum(verdict.outcome == "error" for verdict in all_verdicts)
        _print_table(all_verdicts, report)
        if errors:
            print(f"last error: {scorer.last_error}", file=report)
        return int(errors / len(all_verdicts) > env.max_error_rate)


class _ChunkScorer:
    """Scores chunks of completions with the reward workers and the model rewards of a task."""

    def __init__(self, task: Task, env: EnvConfig) -> None:
        names = {name for each in (task, *task.members.values()) for name in model_reward_names(each.env)}
        self._service = RewardService(task, env)
        self._model_rewards: ModelRewards | None = None
        if names:
            from torchgrpo.rollout.model_rewards.model_rewards import make_model_rewards  # loads torch

            self._model_rewards = make_model_rewards(env, names)
        self._runner = asyncio.Runner()

    def score(self, completions: Sequence[Completion], examples: Sequence[Example]) -> list[Verdict]:
        """Returns the verdicts on completions, in order."""
        verdicts = self._service.score(completions, examples)
        if self._model_rewards is None:
            return verdicts
        return self._runner.run(self._model_rewards.add_scores(self._service.task, completions, examples, verdicts))

    @property
    def last_error(self) -> str:
        """Row and reason of the last error; empty before the first."""
        of_models = "" if self._model_rewards is None else self._model_rewards.counts.last_error
        return of_models or self._service.last_error

    def close(self) -> None:
        """Ends worker processes, connections and threads."""
        with ExitStack() as ending:
            ending.callback(self._service.close)
            ending.callback(self._runner.close)
            if self._model_rewards is not None:
                ending.callback(self._runner.run, self._model_rewards.close())


def _prefill_reader(model: ModelConfig | None, report: TextIO) -> Callable[[Example], str]:
    """Returns a function that computes the answer's beginning in an example's prompt."""
    if model is None:
        return lambda example: example.prefill
    from envs.chat import answer_prefill
    from envs.chat_template import render_prompt
    from torchgrpo.training.model_loading import load_tokenizer

    try:
        if find_config_file(model.name) is None:
            raise ConfigError(f"model.name={model.name} is not on this machine")
        tokenizer = load_tokenizer(model)
    except ConfigError as error:
        print(f"{error}: the reward cannot detect a thought that the chat template opens", file=report)
        return lambda example: example.prefill
    return lambda example: answer_prefill(render_prompt(tokenizer, example), example.prefill)


def _with_prefill(completion: Completion, prefill: str) -> Completion:
    """Adds `<think>` to the prefill of a completion that closes a thought without opening one."""
    closed = completion.text.find("</think>")
    if closed >= 0 and "<think>" not in prefill + completion.text[:closed]:
        prefill += "<think>"
    return replace(completion, prefill=prefill)


def _with_lowest(lowest: MinimumScores, examples: Sequence[Example], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Caps the scores of invalid completions at the lowest score of their group.

    Completions of one row form a group.
    """
    groups: dict[tuple[str, int], list[Verdict]] = {}
    for example, verdict in zip(examples, verdicts, strict=True):
        groups.setdefault((example.source, example.row), []).append(verdict)
    for (source, _), group in groups.items():
        lowest.record_scores(source, group)
    floors = {key: lowest.minimum_score(key[0], group) for key, group in groups.items()}
    return [
        lower_invalid_score(verdict, floors[example.source, example.row])
        for example, verdict in zip(examples, verdicts, strict=True)
    ]


def _read_ledger(run_dir: Path, examples: dict[int, Example]) -> list[tuple[Completion, Example]]:
    """Returns the reward's inputs of completions for training in a ledger, with their examples.

    Raises:
        ConfigError: the folder has no ledger, or a row is not in the data.
    """
    if not ledger_files(run_dir):
        raise ConfigError(
            f"rewards.completions={run_dir}: the folder has no rollouts/ of a run; name a run's folder, or a JSONL file"
        )
    samples = []
    for record in read_records(run_dir, "train"):
        example = _example_of(record["row"], f"{run_dir}, group {record['group_id']}", examples)
        samples += [(parse_reward_input(completion), example) for completion in record["completions"]]
    return samples


def _example_of(row: object, location: str, examples: dict[int, Example]) -> Example:
    if type(row) is not int or row not in examples:
        raise ConfigError(
            f"{location}: row {format_value(row)} is not among the {len(examples)} prompts (rows {min(examples)} to "
            f"{max(examples)}); rows are counted from 0 in the data file"
        )
    return examples[row]


def _parse_sample(value: dict[str, Any], location: str, examples: dict[int, Example]) -> tuple[Completion, Example]:
    if not isinstance(value.get("completion"), str):
        raise ConfigError(
            f'{location}: a sample must be {{"row": index, "completion": text}}, not {format_value(value)}'
        )
    example = _example_of(value.get("row"), location, examples)
    num_tokens, truncated = value.get("num_tokens", 0), value.get("truncated", False)
    if type(num_tokens) is not int or type(truncated) is not bool:
        raise ConfigError(
            f"{location}: num_tokens={format_value(num_tokens)}, truncated={format_value(truncated)}: "
            "num_tokens must be a whole number, and truncated true or false"
        )
    messages = value.get("messages", [])
    if not _are_messages(messages):
        raise ConfigError(
            f"{location}: messages={format_value(messages)}: the messages after the prompt must be a list of "
            '{"role": text, "content": text}'
        )
    return Completion(value["completion"], num_tokens, truncated, turns=tuple(messages)), example


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )


def _print_table(all_verdicts: Sequence[Verdict], report: TextIO) -> None:
    outcomes = Counter(verdict.outcome for verdict in all_verdicts)
    scored = [verdict for verdict in all_verdicts if verdict.outcome != "error"]
    seconds = sorted(verdict.seconds for verdict in all_verdicts)
    lines = [("completions", f"{len(all_verdicts)}")]
    lines += [(name, f"{outcomes[name]}") for name in ("scored", "invalid", "error")]
    if scored:
        lines.append(("mean score", f"{statistics.fmean(verdict.score for verdict in scored):.4f}"))
    names = sorted({name for verdict in scored for name in verdict.components})
    lines += [
        (f"mean {name}", f"{statistics.fmean(v.components.get(name, 0.0) for v in scored):.4f}") for name in names
    ]
    lines += [
        (f"seconds p{share}", f"{seconds[min(len(seconds) - 1, len(seconds) * share // 100)]:.6f}")
        for share in (50, 95, 99)
    ]
    lines.append(("seconds max", f"{seconds[-1]:.6f}"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value:>12}", file=report)
