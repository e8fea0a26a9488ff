"""Runs groups in a thread beside training, and returns batches of them from a buffer.

    loop's thread                                          learner's thread
    ─────────────                                          ────────────────
    room in flight, and the buffer admits: next prompt
    run_group ── sampled: room for another group           groups = take_batch()    waits for ready groups
              └─ scored, kept ── put ───────────────▶      advantage, training
                 not kept: another group in its slot       push of weights          `EngineLoop.call`
       ▲                                                        │
       └───────────── wake: a batch or a push made room ◀───────┘

A task runs one group after another, and waits if there is no room. The number of tasks is the largest number of groups
that were in flight at one time. A failing group fails the loop, and with it a waiting `take_batch`.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from envs.group import Group
from envs.prompts import PromptQueue
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.group_buffer import GroupBuffer
from torchgrpo.rollout.group_rollout import GroupRollout, KeepGroup

_GroupSlot = tuple[int, int, Example]
"""Slot of an admitted group: its number in the order of admission, its group id, and its example."""


@dataclass(eq=False)
class GroupStream:
    """Feeds finished groups into `buffer` while a `with` block runs.

    Args:
        in_flight: groups that all engines together hold at a time.
        timeout: seconds that `take_batch` may wait for one group.
        keep_group, attempts: as in `GroupEnv`.
        on_group_ready: called with every group that enters the buffer.
    """

    loop: EngineLoop
    group_rollout: GroupRollout
    prompts: PromptQueue
    buffer: GroupBuffer[Group]
    in_flight: int
    timeout: float
    keep_group: KeepGroup = lambda group: True
    attempts: int = 10
    on_group_ready: Callable[[Group], None] = lambda group: None
    _num_generating: int = 0
    _stale_groups: list[Group] = field(default_factory=list)
    _examples_in_flight: dict[int, Example] = field(default_factory=dict)
    _slot_waiters: list[asyncio.Future[_GroupSlot]] = field(default_factory=list)
    _may_admit: bool = True
    _thread: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Makes groups start whenever the loop turns and there is room.

        Entering the stream calls this method too.
        """
        self.buffer.on_room = self._on_room
        self.loop.before_step = self._start_groups
        self.loop.on_failure = self.buffer.fail
        self.loop.wake()

    def __enter__(self) -> "GroupStream":
        self.loop.idle_clock.share()  # restarts the measurement: earlier idle time does not count
        self.start()
        self._thread.enter_context(self.loop.thread())
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the thread after its current step.

        The prompts of groups that no batch has taken return to the queue.
        """
        self.buffer.on_room, self.loop.before_step = lambda: None, lambda: None
        self._thread.__exit__(*exception)  # type: ignore[arg-type]
        self.prompts.returned_examples += self.outstanding_examples()
        self._examples_in_flight.clear()
        self._slot_waiters.clear()

    def _on_room(self) -> None:
        """Lets more groups start; safe from any thread."""
        self._may_admit = True
        self.loop.wake()

    @property
    def groups_in_flight(self) -> int:
        """Number of groups that are being generated or scored."""
        return len(self._examples_in_flight)

    def idle_share(self) -> float:
        """Returns the share of time since the last call with all engines idle."""
        return self.loop.idle_clock.share()

    def take_batch(self, on_wait: Callable[[], None] = lambda: None) -> list[Group]:
        """Waits for the next batch of groups, as `GroupBuffer.take_batch`; stale groups are generated anew.

        Scores of invalid completions are lowered again here, since a group may have been scored before any score of
        the run was known.
        """
        groups = self.buffer.take_batch(self.timeout, self._return_stale_group, on_wait)
        self.group_rollout.lowest_scores.lower_invalid_scores(groups)
        return groups

    def _return_stale_group(self, group: Group) -> None:
        """Returns the prompt of a stale group to the queue.

        This happens before the room that the group leaves is filled.
        """
        self._stale_groups.append(group)
        self.prompts.returned_examples.append(group.example)

    def take_stale_groups(self) -> list[Group]:
        """Returns the groups that `take_batch` dropped as stale since the last call."""
        stale, self._stale_groups = self._stale_groups, []
        return stale

    def outstanding_examples(self) -> list[Example]:
        """Returns the examples that no batch has taken, those of ready groups first.

        Must be called in the loop.
        """
        in_flight_examples = [example for _, example in sorted(self._examples_in_flight.items())]
        return [group.example for group in self.buffer.ready_groups()] + in_flight_examples

    def _start_groups(self) -> None:
        """Starts groups until the engines are full or the buffer admits no more."""
        while slot := self._next_slot():
            if self._slot_waiters:
                self._slot_waiters.pop().set_result(slot)
            else:
                self.loop.spawn(partial(self._run_groups, slot))

    def _next_slot(self) -> _GroupSlot | None:
        """Returns a slot for one more group, or None if there is no room."""
        if not self._may_admit or self._num_generating >= self.in_flight:
            return None
        self._may_admit = False  # before the query: `_on_room` of another thread may set it during the query
        sequence = self.buffer.admit()
        if sequence is None:
            return None
        self._may_admit = True
        return self._take_prompt(sequence)

    def _take_prompt(self, sequence: int) -> _GroupSlot:
        self._num_generating += 1
        group_id, example = self.prompts.next_prompt()
        self._examples_in_flight[sequence] = example
        return sequence, group_id, example

    async def _run_groups(self, slot: _GroupSlot) -> None:
        """Runs the groups of one slot after another, and waits while there is no room.

        In a slot, groups are generated until one is kept, which goes into the buffer.
        """

        def on_sampled() -> None:
            self._num_generating -= 1

        while True:
            sequence, group_id, example = slot
            replaced_group: Group | None = None
            for attempts_left in range(self.attempts, -1, -1):
                group = await self.group_rollout.run_group(example, group_id, on_sampled)
                self.group_rollout.lowest_scores.record_and_lower([group])
                self.prompts.observe(group.example, group.success_rate)
                group.replaces = replaced_group
                if not attempts_left or self.keep_group(group):
                    break
                replaced_group = group
                _, group_id, example = self._take_prompt(sequence)
            del self._examples_in_flight[sequence]
            self.on_group_ready(group)
            self.buffer.put(sequence, group.oldest_version, group)
            if (next_slot := self._next_slot()) is None:
                slot_waiter: asyncio.Future[_GroupSlot] = asyncio.get_running_loop().create_future()
                self._slot_waiters.append(slot_waiter)
                next_slot = await slot_waiter
            slot = next_slot
