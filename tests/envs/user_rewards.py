"""User rewards with the signatures of other systems, which tests name by import path."""

import functools
import json
import os
import time
from typing import Any

import numpy

from config.schema.env import EnvConfig
from envs.task import Completion, Example, Reward


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Reward with verl's signature."""
    right = solution_str == ground_truth and data_source == "sums" and not kwargs
    return {"score": 2.0 * right, "acc": right, "pred": solution_str, "index": (extra_info or {}).get("index", -1)}


def verl_subset(ground_truth: str, solution_str: str) -> bool:
    return solution_str == ground_truth


def verl_rest(solution_str: str, **kwargs: Any) -> float:
    return float(sorted(kwargs) == ["extra_info", "ground_truth"])


def trl_shows(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    columns = {name: value for name, value in columns.items() if not callable(value)}
    state = columns.pop("trainer_state")
    columns["state"] = [state.global_step, state.max_steps]
    raise ValueError(json.dumps({"prompts": prompts, "completions": completions} | columns))


def trl_column(completions: list[str], level: list[int], log_metric: Any, log_extra: Any) -> list[float]:
    log_metric("level", float(level[0]))
    log_extra("text", completions)
    return [float(len(text)) for text in completions]


def trl_sometimes(completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "pass" else 0.5 for text in completions]


def trl_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


async def trl_async(completions: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
    return [float(text == reference) for text, reference in zip(completions, ground_truth, strict=True)]


def openrlhf(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    right = [float(query == prompt + label) for query, prompt, label in zip(queries, prompts, labels, strict=True)]
    return {"rewards": numpy.array(right) * 3, "scores": numpy.array(right), "extra_logs": {"form": numpy.array(right)}}


def progress(completion: Completion, step: int, total_steps: int) -> float:
    return step + total_steps / 1000


def global_step(solution_str: str, global_step: int) -> float:
    return float(global_step)


def swapped_parameters(env: EnvConfig, example: Example, completion: Completion) -> float:
    return float(completion.text == example.answer and env.dataset == "jsonl")


def ignores(completion: Completion, _example: Example, _: EnvConfig) -> float:
    return float(isinstance(_example, Example) and isinstance(_, EnvConfig))


def by_position(completion: Completion, example: Example, /) -> float:
    return float(completion.text == example.answer)


def all_positions(*args: Any) -> float:
    completion, example, env = args
    return float(completion.text == example.answer and isinstance(env, EnvConfig))


def column_of_one(completion: Completion, level: int, answer: str, unit: str = "m") -> float:
    return float(level == 3 and answer == completion.text and unit == "m")


def with_timer(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        time.monotonic()
        return function(*args, **kwargs)

    return call


def without_parameter_names(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


wrapped_reward = with_timer(verl_subset)
unnamed_wrapped = without_parameter_names(verl_subset)


def without_keyword_arguments(function: Any) -> Any:
    return lambda *args: function(*args)


positional_wrapped = without_keyword_arguments(verl_subset)
partial = functools.partial(compute_score, "sums")
partial_by_name = with_timer(functools.partial(compute_score, data_source="sums"))


class Judge:
    min_score = -4.0

    def __call__(self, completion: Completion, example: Example) -> float:
        return float(completion.text == example.answer)

    def method(self, solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)


judge = Judge()
method = judge.method
partial_judge = functools.partial(judge)


def unknown(c: Any, e: Any) -> float:
    return 1.0


def nothing(answer: str) -> float:
    return 1.0


def mixed_forms(completions: list[str], example: Example) -> list[float]:
    return [1.0]


def two(completions: list[str]) -> list[float]:
    return [1.0, 2.0]


def text(completion: Completion) -> str:
    return "good"


def no_score(completion: Completion) -> dict[str, Any]:
    return {"score": "high"}


def least(completion: Completion, example: Example) -> float:
    return -2.0


least.min_score = -2.5  # type: ignore[attr-defined]


def no_least(completion: Completion, example: Example) -> float:
    return 1.0


no_least.min_score = "low"  # type: ignore[attr-defined]


LOADED_IN: list[int] = []


def loaded_before(completion: Completion) -> float:
    """Returns 1.0 if `warm_up` ran in the parent process before the fork."""
    return float([os.getppid()] == LOADED_IN)


loaded_before.warm_up = lambda: LOADED_IN.append(os.getpid())  # type: ignore[attr-defined]


def trl_shows_level(completions: list[str], level: list[int | None]) -> list[float]:
    return [-1.0 if each is None else float(each) for each in level]


def lists_step(completions: list[str], step: int, total_steps: int) -> list[float]:
    return [step + total_steps / 100]


def lists_step_default(completions: list[str], step: int = 0, total_steps: int = 0, **rest: Any) -> list[float]:
    return [step + total_steps / 100]


def state_of_one(completion: Completion, trainer_state: Any) -> float:
    return float(trainer_state.global_step)


def of_extra(solution_str: str, extra_info: dict[str, Any]) -> float:
    return float(extra_info.get("index", 0))


def of_truth(solution_str: str, ground_truth: str) -> float:
    return float(ground_truth)


def is_chat(prompts: list[Any], completions: list[Any]) -> list[float]:
    return [float(isinstance(each, list)) for each in completions]


def _compare_texts(text: str, reference: str) -> float:
    return float(text == reference)


@functools.wraps(_compare_texts)
def adapter(completion: Completion, example: Example) -> float:
    return _compare_texts(completion.text, example.answer)


def invalid_five(completion: Completion, example: Example) -> Reward:
    return Reward(5.0, {"accuracy": 1.0}, "invalid")
