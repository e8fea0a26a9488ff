"""Tests that final error messages repeat the exception of another process."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from torchgrpo.cluster.actor_calls import CALL_ERRORS, failure_cause, is_constructor_error
from torchgrpo.cluster.runtime import DeviceSlot, start_ray
from torchgrpo.training.ranks import Ranks


class UnpicklableError(Exception):
    """Exception that cannot be unpickled.

    Pickle passes one argument to the constructor, which takes two.
    """

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class FailingActor:
    def __init__(self, fails_at_once: bool) -> None:
        if fails_at_once:
            raise FileNotFoundError("no weights\nin the folder")

    def fail(self) -> None:
        raise ValueError("the batch is empty\nof everything")

    def fail_unpicklable(self) -> None:
        raise UnpicklableError("this", "that")


REMOTE_ACTOR: Any = ray.remote(FailingActor)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Any:
    started_here = start_ray(None, 2)
    yield
    if started_here:
        ray.shutdown()


def call_error(reference: Any) -> Exception:
    try:
        ray.get(reference)
    except (RayActorError, *CALL_ERRORS) as error:
        return error
    raise AssertionError("it did not fail")


def rank_error_message(error: Exception) -> str:
    """Returns the message about a learner rank that failed with `error`."""
    ranks: Any = SimpleNamespace(slots=[DeviceSlot("learner rank 0")], stacks=lambda: "stacks")
    return str(Ranks._lost_rank_error(ranks, "gradients", {0: error}))


def test_the_last_line_has_type_and_message_of_a_rank_exception() -> None:
    actor = REMOTE_ACTOR.remote(False)
    error = call_error(actor.fail.remote())
    assert failure_cause(error) == "ValueError: the batch is empty of everything"
    last = rank_error_message(error).splitlines()[-1]
    assert last == "learner rank 0 (CPU) failed in gradients: ValueError: the batch is empty of everything"
    strange = rank_error_message(call_error(actor.fail_unpicklable.remote())).splitlines()[-1]
    assert re.search(r"UnpicklableError: this and that$", strange), strange


def test_the_message_has_the_exception_of_a_constructor() -> None:
    error = call_error(REMOTE_ACTOR.remote(True).fail.remote())
    assert is_constructor_error(error)
    assert "in the folder" in failure_cause(error)
    last = rank_error_message(error).splitlines()[-1]
    assert last.startswith("learner rank 0 (CPU) could not be started: ") and "in the folder" in last
    assert "The process was killed" not in rank_error_message(error)
