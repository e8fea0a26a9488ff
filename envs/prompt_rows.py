"""Rows of a data split, with a cached check of each prompt's length."""

from collections.abc import Callable, Sequence

from config.schema.errors import ConfigError
from envs.example import Example


class PromptRows:
    """Rows of a split, with those whose prompts are too long.

    examples: the examples of all members of a mixture.
    fits_limit, describe_length: as for `envs.prompts.PromptSource`.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        fits_limit: Callable[[Example], bool],
        describe_length: Callable[[Sequence[Example]], tuple[str, str]] | None = None,
    ) -> None:
        self.examples, self.fits_limit, self.describe_length = examples, fits_limit, describe_length
        self.too_long_rows: set[int] = set()
        self._accepted_rows: set[int] = set()

    def accepts(self, index: int) -> bool:
        """Whether the prompt at an index fits the limit; checks each row once."""
        if index in self._accepted_rows:
            return True
        if index in self.too_long_rows:
            return False
        accepted = self.fits_limit(self.examples[index])
        (self._accepted_rows if accepted else self.too_long_rows).add(index)
        return accepted

    def check_any_fits(self, start: int, end: int) -> None:
        """Raises ConfigError if the prompts of all rows of [start, end) are too long."""
        if all(index in self.too_long_rows for index in range(start, end)):
            length, remedy = ("", "") if self.describe_length is None else self.describe_length([self.examples[start]])
            length_text = length and f" ({length})"
            raise ConfigError(
                f"all {end - start} prompts are longer than env.max_prompt_tokens{length_text}; raise "
                f"env.max_prompt_tokens (and inference_model.max_model_len, if set){remedy}"
            )
