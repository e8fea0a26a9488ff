"""The rows that prompts are made of, and which of them are short enough to be asked."""

from collections.abc import Callable, Sequence

from config.schema.errors import ConfigError
from envs.example import Example


class Rows:
    """The rows of a split that may be asked.

    examples: of all members of a mixture. keep: examples that it refuses are left out; asked once a row, when the row
    first comes up. told: as for `envs.prompts.PromptSource`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        keep: Callable[[Example], bool],
        told: Callable[[Sequence[Example]], tuple[str, str]] | None = None,
    ) -> None:
        self.examples, self.keep, self.told = examples, keep, told
        self.left_out: set[int] = set()
        self._kept: set[int] = set()

    def accepts(self, index: int) -> bool:
        if index in self._kept:
            return True
        if index in self.left_out:
            return False
        accepted = self.keep(self.examples[index])
        (self._kept if accepted else self.left_out).add(index)
        return accepted

    def check(self, start: int, end: int) -> None:
        """Raises ConfigError where all rows of [start, end) are left out."""
        if all(index in self.left_out for index in range(start, end)):
            length, helps = ("", "") if self.told is None else self.told([self.examples[start]])
            lengths = length and f" ({length})"
            raise ConfigError(
                f"all {end - start} prompts are longer than env.max_prompt_tokens{lengths}: raise it (and "
                f"inference_model.max_model_len, where that is set){helps}"
            )
