"""Closing errors repeat the exception that another process raised."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from torchgrpo.cluster.calls import RAISED, cause_of, raised_in_construction
from torchgrpo.cluster.runtime import Place, start_ray
from torchgrpo.training.ranks import Ranks


class Unbearable(Exception):
    """Its constructor takes what pickle does not give it back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Failing:
    def __init__(self, at_once: bool) -> None:
        if at_once:
            raise FileNotFoundError("no weights\nin the folder")

    def fail(self) -> None:
        raise ValueError("the batch is empty\nof everything")

    def fail_strangely(self) -> None:
        raise Unbearable("this", "that")


REMOTE: Any = ray.remote(Failing)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Any:
    owns = start_ray(None, 2)
    yield
    if owns:
        ray.shutdown()


def raised(reference: Any) -> Exception:
    try:
        ray.get(reference)
    except (RayActorError, *RAISED) as error:
        return error
    raise AssertionError("it did not fail")


def failure(error: Exception) -> str:
    """The message for a rank that failed so."""
    ranks: Any = SimpleNamespace(places=[Place("learner rank 0")], stacks=lambda: "stacks")
    return str(Ranks._failure(ranks, "gradients", {0: error}))


def test_the_last_line_has_type_and_message_of_what_a_rank_raised() -> None:
    actor = REMOTE.remote(False)
    error = raised(actor.fail.remote())
    assert cause_of(error) == "ValueError: the batch is empty of everything"
    last = failure(error).splitlines()[-1]
    assert last == "learner rank 0 (CPU) failed in gradients: ValueError: the batch is empty of everything"
    strange = failure(raised(actor.fail_strangely.remote())).splitlines()[-1]
    assert re.search(r"Unbearable: this and that$", strange), strange


def test_an_actor_whose_constructor_raised_says_what() -> None:
    error = raised(REMOTE.remote(True).fail.remote())
    assert raised_in_construction(error)
    assert "in the folder" in cause_of(error)
    last = failure(error).splitlines()[-1]
    assert last.startswith("learner rank 0 (CPU) could not be made: ") and "in the folder" in last
    assert "Something killed it" not in failure(error)
