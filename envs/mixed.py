"""The examples of several data sets in one sequence, with the weight that each is drawn with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from envs.task import Example


class Mixed(Sequence[Example]):
    """Members one after the other; an example carries the name of its member in `source`.

    bounds: name -> (first index, one past the last). weights: name -> relative number of prompts.
    """

    def __init__(self, members: dict[str, Sequence[Example]], weights: dict[str, float]) -> None:
        self.members = members
        self.weights = weights
        self.bounds: dict[str, tuple[int, int]] = {}
        start = 0
        for name, examples in members.items():
            self.bounds[name] = (start, start + len(examples))
            start += len(examples)
        self._size = start

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        position = index + self._size if index < 0 else index
        for name, (start, end) in self.bounds.items():
            if start <= position < end:
                return replace(self.members[name][position - start], source=name)
        raise IndexError(f"example {index} of {self._size}")
