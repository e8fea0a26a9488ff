"""A tracker that raises, hangs or is slow costs a run's loop nothing, and each thing is said once."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from config.schema.errors import RunOutcome
from torchgrpo.monitoring import tracking
from torchgrpo.monitoring.tracker_interface import ShownCompletion
from torchgrpo.monitoring.tracking import FAILURES, QUEUED, Trackers


class Fake:
    """Notes the steps that it takes; `fails` are those it raises at. It waits for `answers` in every call."""

    def __init__(self, fails: Sequence[int] = (), answers: threading.Event | None = None) -> None:
        self.fails, self.answers = fails, answers
        self.steps: list[int] = []
        self.tables: list[int] = []
        self.outcome: RunOutcome | None = None

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        if self.answers is not None:
            self.answers.wait()
        if step in self.fails:
            raise OSError(f"step {step}\nwith more lines")
        self.steps.append(step)

    def completions(self, shown: Sequence[ShownCompletion], step: int) -> None:
        self.tables.append(step)

    def close(self, outcome: RunOutcome) -> None:
        self.outcome = outcome


class BadEnd(Fake):
    def close(self, outcome: RunOutcome) -> None:
        if self.answers is not None:
            self.answers.wait()
        raise RuntimeError("no end")


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """What hangs ends with the test."""
    event = threading.Event()
    yield event
    event.set()


def run(fake: Fake, steps: int = 8, name: str = "mlflow") -> list[str]:
    """What is told of a run of so many steps."""
    tracked = Trackers({name: lambda tell: fake})
    for step in range(steps):
        tracked.metrics({"reward/mean": 0.5}, step)
    tracked.completions([ShownCompletion("a", "b", 0.0, 0.0)], steps)
    tracked.close("finished")
    return tracked.told()


def test_everything_arrives_in_order_before_the_end() -> None:
    fake = Fake()
    assert run(fake, steps=200) == []
    assert (fake.steps, fake.tables, fake.outcome) == (list(range(200)), [200], "finished")


def test_a_failure_is_said_once_and_what_follows_arrives() -> None:
    fake = Fake(fails=(1, 2, 4))
    assert run(fake) == ["warning: mlflow (logging.backend) failed, metrics.jsonl goes on: OSError: step 1"]
    assert (fake.steps, fake.tables, fake.outcome) == ([0, 3, 5, 6, 7], [8], "finished")


def test_after_failures_in_a_row_it_gets_nothing_more_but_is_closed() -> None:
    fake = Fake(fails=range(2, 100))
    told = run(fake, steps=50)
    assert told == [
        "warning: mlflow (logging.backend) failed, metrics.jsonl goes on: OSError: step 2",
        f"warning: mlflow failed {FAILURES} times in a row and gets nothing more of this run",
    ]
    assert (fake.steps, fake.tables, fake.outcome) == ([0, 1], [], "finished")


def test_one_that_cannot_be_opened_is_said_once() -> None:
    def refuse(tell: object) -> Fake:
        raise ConnectionError("no server")

    other = Fake()
    tracked = Trackers({"mlflow": refuse, "wandb": lambda tell: other})
    for step in range(3):
        tracked.metrics({}, step)
    tracked.close("failed")
    assert tracked.told() == [
        "warning: mlflow (logging.backend) cannot be used, metrics.jsonl goes on: ConnectionError: no server"
    ]
    assert (other.steps, other.outcome) == ([0, 1, 2], "failed")


def test_one_that_hangs_fills_its_queue_alone(
    monkeypatch: pytest.MonkeyPatch, answers: threading.Event
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 3.0)
    hangs, healthy = Fake(answers=answers), Fake()
    tracked = Trackers({"mlflow": lambda tell: hangs, "wandb": lambda tell: healthy})
    for step in range(QUEUED + 50):
        tracked.metrics({"reward/mean": 0.5}, step)
        while len(healthy.steps) <= step:  # else its own queue may be full, too
            time.sleep(0)
    tracked.close("finished")
    assert healthy.steps == list(range(QUEUED + 50)) and healthy.outcome == "finished"
    full, left, count = tracked.told()
    assert full.startswith(
        f"warning: mlflow (logging.backend) does not take what it is sent, {QUEUED} rows wait"
    )
    assert left.startswith("warning: mlflow (logging.backend) did not end within 3 s and is left behind")
    lost = QUEUED + 50 - 1 - QUEUED + 1  # one is in its hands, a queue waits, one makes place for the end
    assert count == f"warning: mlflow: {lost} rows were dropped, metrics.jsonl has them all"


@pytest.mark.parametrize("hangs", [False, True])
def test_an_end_that_fails_or_hangs_does_not_keep_the_run(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, answers: threading.Event
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_S", 3.0)
    fake = BadEnd()
    fake.answers = answers if hangs else None
    answers_in_metrics = Fake.metrics
    monkeypatch.setattr(
        BadEnd,
        "metrics",
        lambda self, *row: self.steps.append(row[1]) if hangs else answers_in_metrics(self, *row),
    )
    (told,) = run(fake)
    assert fake.steps == list(range(8))
    expected = "did not end within" if hangs else "could not be closed: RuntimeError: no end"
    assert expected in told
