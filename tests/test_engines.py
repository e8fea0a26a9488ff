"""Weights on engines that take turns with the learner on one GPU: the order of waking, pushing and sleeping.

There is no GPU here, so engine, canary and transport are stand-ins that note when they are called."""

from collections.abc import Iterable
from typing import Any

import torch

from grpo_engines import Weights

Calls = list[str]


class Noting:
    """Engine, canary and transport in one."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def before_push(self) -> None:
        self.calls.append("score before")

    def after_push(self, version: int, received: frozenset[str]) -> dict[str, float]:
        self.calls.append("score after")
        return {"canary/max_abs_diff": 0.0}

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.calls.append(f"push {version}: {', '.join(name for name, _ in weights)}")


def weights(noting: Any, in_turns: bool) -> Weights:
    return Weights(
        torch.nn.Linear(1, 1, bias=False),
        noting,
        noting,
        noting,
        named=lambda model: model.state_dict().items(),
        sleeper=noting if in_turns else None,
    )


def test_engines_sleep_only_between_collecting_and_the_next_push() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=True)
    pushed.push()
    assert noting.calls == ["score before", "push 0: weight", "score after"]
    noting.calls.clear()
    pushed.rest_engines()
    pushed.rest_engines()
    pushed.push()
    assert noting.calls == ["sleep", "wake", "score before", "push 1: weight", "score after"]


def test_engines_with_gpus_of_their_own_never_sleep() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    pushed.push()
    pushed.rest_engines()
    pushed.push()
    assert not {"sleep", "wake"} & set(noting.calls)


def test_an_engine_replaced_in_a_push_gets_no_push_inside_it() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    under_way: list[bool] = []
    push = noting.push

    def note(weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        under_way.append(pushed.pushing)
        push(weights, version)

    noting.push = note  # type: ignore[method-assign]
    pushed.push()
    pushed.push_again()
    assert under_way == [True, True]
    assert not pushed.pushing


def test_a_replaced_engine_gets_the_present_version_again() -> None:
    noting = Noting()
    pushed = weights(noting, in_turns=False)
    pushed.push()
    noting.calls.clear()
    pushed.push_again()
    assert noting.calls == ["push 0: weight"]
    assert pushed.version == 0
