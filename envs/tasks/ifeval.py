"""IFEval (Zhou et al. 2023) and IFBench (Pyatkin et al. 2025): instructions that a program can check."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.row_files import shown
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.extract import after_thinking
from envs.verifiers.ifeval import Instruction, instructions, judge, load_models

OPTIONS: dict[str, tuple[str, ...]] = {"verdict": ("strict", "loose"), "credit": ("share", "all")}


@register("ifeval")
class IFEval(Task):
    """The share of instructions followed (`credit=share`), or 1.0 only for all of them (`credit=all`).

    Options: `verdict` (`strict`, or `loose`: also without the first or last line, or asterisks) and `credit`.
    Parts: `accuracy` (all followed, as `verdict` says), `instructions` (their share), and `strict` and `loose` (all
    followed in that sense), as the paper reports them.
    """

    hub = "google/IFEval"
    weights: Mapping[str, float] = MappingProxyType(
        {"accuracy": 0.0, "instructions": 1.0, "strict": 0.0, "loose": 0.0}
    )

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        for key, value in env.options.items():
            if key not in OPTIONS or value not in OPTIONS[key]:
                known = "; ".join(f"{name}: {', '.join(values)}" for name, values in OPTIONS.items())
                raise ConfigError(f"env.options.{key}={value!r}: the {self.name} task knows {known}")
        self.verdict: str = env.options.get("verdict", "strict")
        if env.options.get("credit") == "all":
            self.weights = {"accuracy": 1.0, "instructions": 0.0, "strict": 0.0, "loose": 0.0}

    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, self.hub, None, "train")
        examples = [self._example(row) for row in rows]
        load_models([instruction for example in examples for instruction in _instructions(example.answer)])
        return examples

    def _example(self, row: Row) -> Example:
        ids, arguments = row["instruction_id_list"], _read(row["kwargs"])
        if isinstance(arguments, list):
            arguments = [_read(given) for given in arguments]
        if not _all(ids, str) or not _all(arguments, dict | None):
            raise ConfigError(
                f"{row.place}: instruction_id_list must be a list of texts and kwargs one of objects, they are "
                f"{shown(ids)} and {shown(arguments)}"
            )
        answer = {"ids": ids, "arguments": arguments}
        try:
            _instructions(answer)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{row.place}: {error}") from error
        return Example(self.messages(row.text("prompt")), answer, row.index, row_data=self.row_data(row))

    def reward(self, completion: Completion, example: Example) -> Reward:
        text = completion.full_text
        spoken = after_thinking(text)
        shown_text = "" if spoken is None else text if spoken == text else spoken.lstrip()
        followed = judge(shown_text, _instructions(example.answer))
        chosen = followed.strict if self.verdict == "strict" else followed.loose
        parts = {
            "accuracy": float(all(chosen)),
            "instructions": sum(chosen) / len(chosen),
            "strict": float(all(followed.strict)),
            "loose": float(all(followed.loose)),
        }
        return Reward(sum(self.weights[name] * part for name, part in parts.items()), parts)


@register("ifbench")
class IFBench(IFEval):
    """The task `ifeval` with IFBench's rows."""

    hub = "allenai/IFBench_test"


def _read(value: Any) -> Any:
    """Parse a JSON text; leave anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _all(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _instructions(answer: Any) -> tuple[Instruction, ...]:
    return instructions(answer["ids"], answer["arguments"])
