"""Tasks `ifeval` and `ifbench`: prompts with instructions that a program can verify.

Sources: IFEval (Zhou et al. 2023) and IFBench (Pyatkin et al. 2025).
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row, load_rows
from envs.row_files import format_value
from envs.task import Completion, Example, Reward, Task, register
from envs.verifiers.extract import text_after_thinking
from envs.verifiers.instructions import Instruction, check_instructions, load_text_models, parse_instructions

OPTIONS: dict[str, tuple[str, ...]] = {"verdict": ("strict", "loose"), "credit": ("share", "all")}


@register("ifeval")
class IFEval(Task):
    """Task with the share of followed instructions as reward.

    Options: `credit` (`share`, or `all`: 1.0 only if all instructions are followed) and `verdict` (`strict`, or
    `loose`: also without the first line, the last line or asterisks). Reward components: `accuracy` (all followed under
    `verdict`), `instructions` (share of followed instructions), `strict` and `loose` (all followed under these
    verdicts), as in the paper.
    """

    hub = "google/IFEval"
    weights: Mapping[str, float] = MappingProxyType({"accuracy": 0.0, "instructions": 1.0, "strict": 0.0, "loose": 0.0})

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        for key, value in env.options.items():
            if key not in OPTIONS or value not in OPTIONS[key]:
                known = "; ".join(f"{name}: {', '.join(values)}" for name, values in OPTIONS.items())
                raise ConfigError(
                    f"env.options.{key}={value!r}: no such option of the {self.name} task; choose one of {known}"
                )
        self.verdict: str = env.options.get("verdict", "strict")
        if env.options.get("credit") == "all":
            self.weights = {"accuracy": 1.0, "instructions": 0.0, "strict": 0.0, "loose": 0.0}

    def examples(self, split: str) -> Sequence[Example]:
        rows = load_rows(self.env, self.hub, None, "train")
        examples = [self._example(row) for row in rows]
        load_text_models([instruction for example in examples for instruction in _instructions(example.answer)])
        return examples

    def _example(self, row: Row) -> Example:
        ids, arguments = row["instruction_id_list"], _parse_json(row["kwargs"])
        if isinstance(arguments, list):
            arguments = [_parse_json(value) for value in arguments]
        if not _is_list_of(ids, str) or not _is_list_of(arguments, dict | None):
            raise ConfigError(
                f"{row.place}: instruction_id_list must be a list of texts and kwargs a list of objects, but "
                f"they are {format_value(ids)} and {format_value(arguments)}"
            )
        answer = {"ids": ids, "arguments": arguments}
        try:
            _instructions(answer)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{row.place}: {error}") from error
        return Example(self.messages(row.text("prompt")), answer, row.index, row_data=self.row_data(row))

    def reward(self, completion: Completion, example: Example) -> Reward:
        text = completion.full_text
        answer_text = text_after_thinking(text)
        shown_text = "" if answer_text is None else text if answer_text == text else answer_text.lstrip()
        followed = check_instructions(shown_text, _instructions(example.answer))
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
    """Task `ifeval` with the rows of IFBench."""

    hub = "allenai/IFBench_test"


def _parse_json(value: Any) -> Any:
    """Parses a text with JSON; returns any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_list_of(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _instructions(answer: Any) -> tuple[Instruction, ...]:
    return parse_instructions(answer["ids"], answer["arguments"])
