"""Rows in the order of epochs: each once, shuffled by seed and epoch."""

import random


class EpochOrder:
    """The rows [start, end), each once an epoch. `salt` keeps members of equal size from going in step.

    served: rows of this epoch that were drawn. unfiltered: the last epoch served none, so this one takes all. count:
    how many rows were there when this epoch began: those that are appended meanwhile are part of the next.
    """

    def __init__(self, start: int, end: int, salt: str) -> None:
        self.start, self.end, self.salt = start, end, salt
        self.go_to(0, 0, 0, False)

    def go_to(
        self, epoch: int, position: int, served: int, unfiltered: bool, count: int | None = None
    ) -> None:
        self.epoch, self.position, self.served, self.unfiltered = epoch, position, served, unfiltered
        self.count = self.end - self.start if count is None else count
        self.rows = list(range(self.start, self.start + self.count))
        random.Random(f"{self.salt}{epoch}").shuffle(self.rows)

    def next(self) -> int | None:
        """The next row, or None once at the end of each epoch."""
        if self.position == len(self.rows):
            self.go_to(self.epoch + 1, 0, 0, self.served == 0)
            return None
        self.position += 1
        return self.rows[self.position - 1]

    def state(self) -> tuple[int, int, int, bool, int]:
        return self.epoch, self.position, self.served, self.unfiltered, self.count
