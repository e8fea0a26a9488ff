"""Buffer that admits new groups, and batches finished groups within the limit `train.max_policy_age`.

    admit ─▶ in flight ─▶ put ─▶ ready ─▶ take_batch ─▶ learner
      │                                       │
      └── not before its batch is near ◀──────┘  version, groups taken

The buffer decides which groups may start and which are trained on. It holds no tensors.

Batches and admitted groups are numbered: group i is meant for batch i // batch_groups, and the trainer's version at
every batch is known in advance. A group is admitted only if that version is at most `max_age` above the current one.
A group can then become too old only if later groups overtake it. With `keep_order` (`wait`), batches are built in the
order of admission, so no group is ever too old. Without it (`drop`), batches are built in the order of completion (of
the ready groups, the group that started first), and a group that is too old at its turn is returned for
regeneration. Groups with long answers become too old most often, so `drop` trains on shorter answers than the policy
samples.

Every operation costs at most the logarithm of the number of ready groups, whatever the number of workers.
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
    """Buffer between a thread that starts and finishes groups and a thread that takes batches.

    batch_groups: groups of one batch. max_age: versions between a group's start and its consumption.
    batches_per_version: batches between two weight pushes. capacity: groups that may be ready and not taken.
    keep_order: consume in the order of admission (`train.stale_groups=wait`), else of completion (`drop`).
    first_batch: number of batches that a resumed run has trained on before. version: current version of the trainer.
    on_room: called after groups were taken or a version was pushed, when more groups may start.
    """

    batch_groups: int
    max_age: int
    batches_per_version: int
    capacity: int
    keep_order: bool
    first_batch: int = 0
    version: int = 0
    on_room: Callable[[], None] = lambda: None
    groups_admitted: int = 0
    groups_taken: int = 0
    groups_dropped: int = 0
    _ready: dict[int, tuple[int, Group]] = field(default_factory=dict)  # by sequence number: version, group
    _order: list[int] = field(default_factory=list)  # heap of the sequence numbers, unless `keep_order`
    _batch: list[Group] = field(default_factory=list)
    _failure: BaseException | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # faster to enter than a Condition

    def __post_init__(self) -> None:
        self._condition = threading.Condition(self._lock)
        self._update_admission_limit(self.first_batch)

    def admit(self) -> int | None:
        """Admits a group and returns its sequence number, or None if no group may start."""
        with self._lock:
            sequence = self.groups_admitted
            if len(self._ready) >= self.capacity or sequence - self.groups_dropped >= self._admission_limit:
                return None
            self.groups_admitted += 1
            return sequence

    def _update_admission_limit(self, next_batch: int) -> None:
        """Sets how many groups may start: those of batches at most `max_age` versions ahead."""
        versions = next_batch // self.batches_per_version + self.max_age + 1
        self._admission_limit = (versions * self.batches_per_version - self.first_batch) * self.batch_groups

    @property
    def groups_ready(self) -> int:
        return len(self._ready)

    @property
    def groups_gathered(self) -> int:
        """Number of groups of the next batch that have arrived."""
        return min(self.batch_groups, len(self._batch) + self.groups_ready)

    def put(self, sequence: int, version: int, group: Group) -> None:
        """Stores a finished group; `version` is the oldest policy version among its tokens."""
        with self._lock:
            self._ready[sequence] = version, group
            if not self.keep_order:
                heapq.heappush(self._order, sequence)
            too_old = self.version - version > self.max_age  # its replacement can start at once
            if too_old or len(self._batch) + len(self._ready) >= self.batch_groups:
                self._condition.notify_all()

    def take_batch(
        self, timeout: float, on_stale_group: Callable[[Group], None], on_wait: Callable[[], None] = lambda: None
    ) -> list[Group]:
        """Waits for the next batch of groups and returns it.

        Groups that are too old go to `on_stale_group` and are counted, never returned. `on_wait` is called about once
        a second during the wait.

        Raises:
            DeadlineError: no group arrived for `timeout` seconds. Groups that arrived stay for the next call.
            BaseException: the failure of the producing thread.
        """
        deadline, taken_before = time.monotonic() + timeout, self.groups_taken
        while True:
            with self._lock:
                batch = self.try_take_batch(on_stale_group)
                if batch is not None:
                    return batch
                self.check_failure()
                if self.groups_taken > taken_before:
                    deadline, taken_before = time.monotonic() + timeout, self.groups_taken
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    have, in_flight = (len(self._batch), self.groups_admitted - self.groups_taken - self.groups_ready)
                    raise DeadlineError(
                        f"the learner waited {timeout:.0f} s (train.wait_timeout_s) for the engines: the "
                        f"batch has {have} of {self.batch_groups} groups, {in_flight} are in flight, "
                        f"{self.groups_ready} are ready"
                    )
                self._condition.wait(min(remaining, 1.0))
            on_wait()

    def try_take_batch(self, on_stale_group: Callable[[Group], None]) -> list[Group] | None:
        """Returns the next batch if all its groups are ready, else None; as `take_batch`."""
        with self._lock:
            taken_before = self.groups_taken
            while len(self._batch) < self.batch_groups and (sequence := self._next_sequence()) in self._ready:
                version, group = self._ready.pop(sequence)
                self.groups_taken += 1
                if self.version - version > self.max_age:
                    self.groups_dropped += 1
                    on_stale_group(group)
                else:
                    self._batch.append(group)
            if self.groups_taken > taken_before:
                self.on_room()
            if len(self._batch) < self.batch_groups:
                return None
            batch, self._batch = self._batch, []
            return batch

    def _next_sequence(self) -> int:
        """Returns the sequence number of the next group to take, or -1.

        The group may not be ready.
        """
        if self.keep_order:
            return self.groups_taken
        return heapq.heappop(self._order) if self._order else -1

    def set_version(self, version: int) -> None:
        """Sets the version of the trainer's weights, so that more groups may start."""
        with self._lock:
            self.version = version
            self._update_admission_limit(
                self.first_batch + (self.groups_taken - self.groups_dropped) // self.batch_groups
            )
            self._condition.notify_all()
        self.on_room()

    def fail(self, error: BaseException) -> None:
        """Records the error that ended the producing thread, for `take_batch` to raise."""
        with self._lock:
            self._failure = error
            self._condition.notify_all()

    def check_failure(self) -> None:
        """Raises the failure of the producing thread, if any."""
        if self._failure is not None:
            raise self._failure

    def ready_groups(self) -> list[Group]:
        """Returns the ready groups that no batch has taken, in the order of taking."""
        with self._lock:
            return self._batch + [self._ready[sequence][1] for sequence in sorted(self._ready)]
