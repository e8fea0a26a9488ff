"""Groups beside optimisation: a number of them is kept alive, and each goes into a buffer as it ends.

    loop's thread                                          learner's thread
    ─────────────                                          ────────────────
    room in flight, and the buffer admits: draw a prompt
    run_group ── drawn: room for another                   groups = take()     waits for ready groups
              └─ judged, wanted ── put ─────────────▶      advantage, learn
                 not wanted: another in its place          push weights        `EngineLoop.call`
       ▲                                                        │
       └───────────── wake: a take or a push made room ◀────────┘

A task makes one group after another, and waits where there is no room; there are as many tasks as groups were ever
generated or judged at a time. A failing group fails the loop, and with it whatever waits in `take`.
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
from torchgrpo.rollout.generate import Generation, KeepGroup
from torchgrpo.rollout.group_buffer import GroupBuffer

_Place = tuple[int, int, Example]
"""Its number in the order of admission, the id of the group that is made there, and its example."""


@dataclass(eq=False)
class Stream:
    """Feeds `buffer` while a `with` block lasts.

    Args:
        in_flight: groups that all engines together hold at a time.
        timeout: seconds that `take` may wait for one group.
        keep_group, attempts: as in `GroupEnv`.
        ready: called with every group that enters the buffer.
    """

    loop: EngineLoop
    generation: Generation
    prompts: PromptQueue
    buffer: GroupBuffer[Group]
    in_flight: int
    timeout: float
    keep_group: KeepGroup = lambda group: True
    attempts: int = 10
    ready: Callable[[Group], None] = lambda group: None
    _generating: int = 0
    _stale: list[Group] = field(default_factory=list)
    _flying: dict[int, Example] = field(default_factory=dict)
    _waiting: list[asyncio.Future[_Place]] = field(default_factory=list)
    _admits: bool = True
    _thread: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        """From now on groups begin whenever the loop turns and there is room; who enters the stream need not ask."""
        self.buffer.made_room = self._made_room
        self.loop.before_step = self._begin
        self.loop.on_failure = self.buffer.fail
        self.loop.wake()

    def __enter__(self) -> "Stream":
        self.loop.idle.share()  # what was idle before does not count
        self.begin()
        self._thread.enter_context(self.loop.thread())
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the thread after its current step; the prompts of groups that no batch has taken are handed back."""
        self.buffer.made_room, self.loop.before_step = lambda: None, lambda: None
        self._thread.__exit__(*exception)  # type: ignore[arg-type]
        self.prompts.returned += self.outstanding()
        self._flying.clear()
        self._waiting.clear()

    def _made_room(self) -> None:
        """From any thread."""
        self._admits = True
        self.loop.wake()

    @property
    def groups_in_flight(self) -> int:
        """Groups that are generated or judged now."""
        return len(self._flying)

    def idle_share(self) -> float:
        """Share of the time since the last call in which no engine had anything to do."""
        return self.loop.idle.share()

    def take(self, meanwhile: Callable[[], None] = lambda: None) -> list[Group]:
        """The next batch of groups; see `GroupBuffer.take`. The prompts of those too old are drawn again.

        A group that was judged before any score of the run was known is lowered now.
        """
        groups = self.buffer.take(self.timeout, self._hand_back, meanwhile)
        self.generation.lowest.lower(groups)
        return groups

    def _hand_back(self, group: Group) -> None:
        """At once, so that its prompt is there when the room that it leaves is used."""
        self._stale.append(group)
        self.prompts.returned.append(group.example)

    def take_stale(self) -> list[Group]:
        """Groups that `take` found too old, since the last call."""
        stale, self._stale = self._stale, []
        return stale

    def outstanding(self) -> list[Example]:
        """Examples that no batch has taken, those of ready groups first; to be asked in the loop."""
        flying = [example for _, example in sorted(self._flying.items())]
        return [group.example for group in self.buffer.contents()] + flying

    def _begin(self) -> None:
        """Begin groups until the engines are full or the buffer wants no more."""
        while place := self._next_place():
            if self._waiting:
                self._waiting.pop().set_result(place)
            else:
                self.loop.spawn(partial(self._fill_places, place))

    def _next_place(self) -> _Place | None:
        """One more, if the engines and the buffer have room."""
        if not self._admits or self._generating >= self.in_flight:
            return None
        self._admits = False  # before it is asked, since it may change its mind at any moment
        sequence = self.buffer.admit()
        if sequence is None:
            return None
        self._admits = True
        return self._draw(sequence)

    def _draw(self, sequence: int) -> _Place:
        self._generating += 1
        group_id, example = self.prompts.begin_one()
        self._flying[sequence] = example
        return sequence, group_id, example

    async def _fill_places(self, place: _Place) -> None:
        """One after the other, as there is room. Groups are made in a place until one is wanted: the buffer gets it."""

        def drawn() -> None:
            self._generating -= 1

        while True:
            sequence, group_id, example = place
            refused: Group | None = None
            for left in range(self.attempts, -1, -1):
                group = await self.generation.run_group(example, group_id, drawn)
                self.generation.lowest.settle([group])
                self.prompts.observe(group.example, group.success_rate)
                group.in_place_of = refused
                if not left or self.keep_group(group):
                    break
                refused = group
                _, group_id, example = self._draw(sequence)
            del self._flying[sequence]
            self.ready(group)
            self.buffer.put(sequence, group.version, group)
            if (another := self._next_place()) is None:
                given: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
                self._waiting.append(given)
                another = await given
            place = another
