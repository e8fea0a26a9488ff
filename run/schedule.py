"""The two schedules as types: what a script's loop works with, and what it calls itself."""

from typing import TypeAlias, TypeVar

from run.lockstep import Lockstep
from run.overlapped import Overlapped

Schedule: TypeAlias = Lockstep | Overlapped
ScheduleType = TypeVar("ScheduleType", Lockstep, Overlapped)
