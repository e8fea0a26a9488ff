"""Order of the rows of an epoch: every row once, shuffled by seed and epoch."""

import random


class EpochOrder:
    """Iterator over the rows [start, end) that returns every row once an epoch.

    salt: prefix of the shuffle's seed; different salts keep members of equal size from the same order.
    num_sampled: rows of this epoch that were sampled.
    ignores_difficulty: the last epoch sampled no row, so this epoch takes all rows.
    count: number of rows of this epoch. Rows appended to the data during an epoch belong to the next epoch.
    """

    def __init__(self, start: int, end: int, salt: str) -> None:
        self.start, self.end, self.salt = start, end, salt
        self.set_position(0, 0, 0, False)

    def set_position(
        self, epoch: int, position: int, num_sampled: int, ignores_difficulty: bool, count: int | None = None
    ) -> None:
        """Goes to a position of an epoch, with the fields of `state`."""
        self.epoch, self.position, self.num_sampled, self.ignores_difficulty = (
            epoch, position, num_sampled, ignores_difficulty,
        )  # fmt: skip
        self.count = self.end - self.start if count is None else count
        self.rows = list(range(self.start, self.start + self.count))
        random.Random(f"{self.salt}{epoch}").shuffle(self.rows)

    def next_row(self) -> int | None:
        """Returns the next row, or None once at the end of each epoch."""
        if self.position == len(self.rows):
            self.set_position(self.epoch + 1, 0, 0, self.num_sampled == 0)
            return None
        self.position += 1
        return self.rows[self.position - 1]

    def state(self) -> tuple[int, int, int, bool, int]:
        """Returns the position for a checkpoint."""
        return self.epoch, self.position, self.num_sampled, self.ignores_difficulty, self.count
