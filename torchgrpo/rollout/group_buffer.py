"""Which groups may start, and which are trained on: the bound on age, as bookkeeping without tensors.

    admit ─▶ in flight ─▶ put ─▶ ready ─▶ take ─▶ the learner
      │                                     │
      └── not before its batch is near ◀────┘  version, taken

Batches are numbered, and so are the groups as they are admitted: group i is meant for batch i // batch_groups,
and the trainer's version at every batch is known in advance. A group is admitted only if that version lies at
most `max_age` above the present one. Then what can go wrong is overtaking: with `keep_order` (`wait`) batches
are made in the order of admission, so that no group is ever too old; without it (`drop`) in the order of
completion (of the ready groups the one that began first), and a group that is too old when its turn comes is
handed back for regeneration. Groups with long answers are the ones that get too old, so `drop` trains on
shorter answers than the policy gives.

Every operation costs at most the logarithm of the ready groups, whatever the number of workers.
"""

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from config.schema.errors import DeadlineError

Group = TypeVar("Group")


@dataclass
class GroupBuffer(Generic[Group]):
    """Between one thread that starts and finishes groups and one that takes batches of them.

    batch_groups: groups of one batch. max_age: versions between a group's start and its consumption.
    batches_per_version: batches between two weight pushes. capacity: groups that may be ready and not taken.
    keep_order: consume in admission order (`train.stale_groups=wait`), else in order of completion (`drop`).
    first_batch: batches that earlier parts of a resumed run have trained on. version: the trainer's, then and now.
    made_room: called where groups were taken, or a version was pushed: more groups may start now.
    """

    batch_groups: int
    max_age: int
    batches_per_version: int
    capacity: int
    keep_order: bool
    first_batch: int = 0
    version: int = 0
    made_room: Callable[[], None] = lambda: None
    admitted: int = 0
    taken: int = 0
    dropped: int = 0
    _ready: dict[int, tuple[int, Group]] = field(default_factory=dict)  # by sequence: version, group
    _order: list[int] = field(default_factory=list)  # without `keep_order`: a heap of their sequences
    _batch: list[Group] = field(default_factory=list)
    _failure: BaseException | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # entered in C, a condition in Python

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)
        self._bound(self.first_batch)

    def admit(self) -> int | None:
        """The sequence number of a group that starts now; None where no more may."""
        with self._lock:
            sequence = self.admitted
            if len(self._ready) >= self.capacity or sequence - self.dropped >= self._admissible:
                return None
            self.admitted += 1
            return sequence

    def _bound(self, next_batch: int) -> None:
        """Groups may start up to the last batch of the newest version that is `max_age` above the present one."""
        versions = next_batch // self.batches_per_version + self.max_age + 1
        self._admissible = (versions * self.batches_per_version - self.first_batch) * self.batch_groups

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def gathered(self) -> int:
        """Groups of the next batch that are there."""
        return min(self.batch_groups, len(self._batch) + self.ready)

    def put(self, sequence: int, version: int, group: Group) -> None:
        """A finished group; `version` is the oldest that drew one of its tokens."""
        with self._lock:
            self._ready[sequence] = version, group
            if not self.keep_order:
                heapq.heappush(self._order, sequence)
            too_old = self.version - version > self.max_age  # another can be made at once
            if too_old or len(self._batch) + len(self._ready) >= self.batch_groups:
                self._changed.notify_all()

    def take(
        self, timeout: float, give_back: Callable[[Group], None], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Group]:
        """The next batch. Groups too old at this moment go to `give_back` and are counted, never returned.

        While it waits, `meanwhile` is called about once a second.

        Raises:
            DeadlineError: nothing arrived for `timeout` seconds. What did arrive stays for the next call.
            BaseException: what the producing thread failed with.
        """
        deadline, had = time.monotonic() + timeout, self.taken
        while True:
            with self._lock:
                batch = self.take_now(give_back)
                if batch is not None:
                    return batch
                self.check()
                if self.taken > had:
                    deadline, had = time.monotonic() + timeout, self.taken
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    have, flying = len(self._batch), self.admitted - self.taken - self.ready
                    raise DeadlineError(
                        f"the learner waited {timeout:.0f} s (train.wait_timeout_s) for the engines: it has {have} of "
                        f"{self.batch_groups} groups, {flying} are in flight, {self.ready} are ready"
                    )
                self._changed.wait(min(remaining, 1.0))
            meanwhile()

    def take_now(self, give_back: Callable[[Group], None]) -> list[Group] | None:
        """As `take`, but None where it would wait."""
        with self._lock:
            had = self.taken
            while len(self._batch) < self.batch_groups and (sequence := self._next()) in self._ready:
                version, group = self._ready.pop(sequence)
                self.taken += 1
                if self.version - version > self.max_age:
                    self.dropped += 1
                    give_back(group)
                else:
                    self._batch.append(group)
            if self.taken > had:
                self.made_room()
            if len(self._batch) < self.batch_groups:
                return None
            batch, self._batch = self._batch, []
            return batch

    def _next(self) -> int:
        """Whose turn it is, if that one is ready."""
        if self.keep_order:
            return self.taken
        return heapq.heappop(self._order) if self._order else -1

    def pushed(self, version: int) -> None:
        """The trainer's weights have a new version: more groups may start."""
        with self._lock:
            self.version = version
            self._bound(self.first_batch + (self.taken - self.dropped) // self.batch_groups)
            self._changed.notify_all()
        self.made_room()

    def fail(self, error: BaseException) -> None:
        """The producing thread ended with an error: `take` raises it."""
        with self._lock:
            self._failure = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what the producing thread failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    def contents(self) -> list[Group]:
        """Ready groups that no batch has taken, in the order in which they would be."""
        with self._lock:
            return self._batch + [self._ready[sequence][1] for sequence in sorted(self._ready)]
