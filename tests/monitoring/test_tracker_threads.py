"""Tests of trackers that raise, hang or are slow; each problem is reported once."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from config.schema.errors import RunOutcome
from torchgrpo.monitoring import tracker_threads
from torchgrpo.monitoring.tracker_interface import CompletionRow
from torchgrpo.monitoring.tracker_threads import MAX_FAILURES, QUEUE_SIZE, Trackers


class FakeTracker:
    """Tracker that records its steps.

    failing_steps: steps at which `metrics` raises. release: event that each call waits for; None: no waiting.
    """

    def __init__(self, failing_steps: Sequence[int] = (), release: threading.Event | None = None) -> None:
        self.failing_steps, self.release = failing_steps, release
        self.is_called = threading.Event()
        self.steps: list[int] = []
        self.tables: list[int] = []
        self.outcome: RunOutcome | None = None

    def metrics(self, numbers: Mapping[str, float], step: int) -> None:
        self.is_called.set()
        if self.release is not None:
            self.release.wait()
        if step in self.failing_steps:
            raise OSError(f"step {step}\nwith more lines")
        self.steps.append(step)

    def completions(self, rows: Sequence[CompletionRow], step: int) -> None:
        self.tables.append(step)

    def close(self, outcome: RunOutcome) -> None:
        self.outcome = outcome


class TrackerFailingAtClose(FakeTracker):
    """Tracker whose `close` raises."""

    def close(self, outcome: RunOutcome) -> None:
        if self.release is not None:
            self.release.wait()
        raise RuntimeError("no end")


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Event that releases hanging trackers at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def track_run(fake: FakeTracker, steps: int = 8, name: str = "mlflow") -> list[str]:
    """Tracks a run with some steps and returns the messages."""
    trackers = Trackers({name: lambda on_message: fake})
    for step in range(steps):
        trackers.metrics({"reward/mean": 0.5}, step)
    trackers.completions([CompletionRow("a", "b", 0.0, 0.0)], steps)
    trackers.close("finished")
    return trackers.take_messages()


def test_all_calls_arrive_in_order_before_the_end() -> None:
    fake = FakeTracker()
    assert track_run(fake, steps=200) == []
    assert (fake.steps, fake.tables, fake.outcome) == (list(range(200)), [200], "finished")


def test_failure_is_reported_once_and_later_calls_arrive() -> None:
    fake = FakeTracker(failing_steps=(1, 2, 4))
    assert track_run(fake) == [
        "warning: mlflow (logging.backend) failed, metrics.jsonl is still written: OSError: step 1"
    ]
    assert (fake.steps, fake.tables, fake.outcome) == ([0, 3, 5, 6, 7], [8], "finished")


def test_tracker_with_repeated_failures_is_skipped_but_closed() -> None:
    fake = FakeTracker(failing_steps=range(2, 100))
    messages = track_run(fake, steps=50)
    assert messages == [
        "warning: mlflow (logging.backend) failed, metrics.jsonl is still written: OSError: step 2",
        f"warning: mlflow failed {MAX_FAILURES} times in a row and gets no further data of this run",
    ]
    assert (fake.steps, fake.tables, fake.outcome) == ([0, 1], [], "finished")


def test_failure_to_open_is_reported_once() -> None:
    def raise_at_open(on_message: object) -> FakeTracker:
        raise ConnectionError("no server")

    other = FakeTracker()
    trackers = Trackers({"mlflow": raise_at_open, "wandb": lambda on_message: other})
    for step in range(3):
        trackers.metrics({}, step)
    trackers.close("failed")
    assert trackers.take_messages() == [
        "warning: mlflow (logging.backend) cannot be used, only metrics.jsonl is written: ConnectionError: no server"
    ]
    assert (other.steps, other.outcome) == ([0, 1, 2], "failed")


def test_hanging_tracker_fills_only_its_own_queue(monkeypatch: pytest.MonkeyPatch, release: threading.Event) -> None:
    monkeypatch.setattr(tracker_threads, "CLOSE_S", 3.0)
    hanging, healthy = FakeTracker(release=release), FakeTracker()
    trackers = Trackers({"mlflow": lambda on_message: hanging, "wandb": lambda on_message: healthy})
    for step in range(QUEUE_SIZE + 50):
        trackers.metrics({"reward/mean": 0.5}, step)
        assert hanging.is_called.wait(600)
        while len(healthy.steps) <= step:  # otherwise its own queue may be full as well
            time.sleep(0)
    trackers.close("finished")
    assert healthy.steps == list(range(QUEUE_SIZE + 50)) and healthy.outcome == "finished"
    full_message, abandoned_message, count_message = trackers.take_messages()
    assert full_message.startswith(
        f"warning: mlflow (logging.backend) does not accept rows, {QUEUE_SIZE} rows are queued"
    )
    assert abandoned_message.startswith("warning: mlflow (logging.backend) did not close within 3 s and is abandoned")
    # Of all rows, one is being sent and QUEUE_SIZE are queued; one of these makes room for the end.
    num_dropped = QUEUE_SIZE + 50 - 1 - QUEUE_SIZE + 1
    assert count_message == f"warning: mlflow: {num_dropped} rows were dropped. metrics.jsonl has all rows"


@pytest.mark.parametrize("hangs", [False, True])
def test_failing_or_hanging_close_does_not_delay_the_run(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    if hangs:
        monkeypatch.setattr(tracker_threads, "CLOSE_S", 3.0)
    fake = TrackerFailingAtClose()
    fake.release = release if hangs else None
    original_metrics = FakeTracker.metrics
    monkeypatch.setattr(
        TrackerFailingAtClose,
        "metrics",
        lambda self, *row: self.steps.append(row[1]) if hangs else original_metrics(self, *row),
    )
    (message,) = track_run(fake)
    deadline = time.monotonic() + 600
    while len(fake.steps) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.steps == list(range(8))
    expected = "did not close within" if hangs else "could not be closed: RuntimeError: no end"
    assert expected in message
