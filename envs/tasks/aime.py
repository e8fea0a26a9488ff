"""AIME 2024 and 2025: thirty problems a year with whole numbers from 0 to 999. For evaluation, not for training."""

import re
from typing import ClassVar

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row
from envs.task import register
from envs.tasks.math_rows import MathTask, text_or_none

HUBS: dict[int, tuple[str, str | None]] = {
    2024: ("HuggingFaceH4/aime_2024", None),
    2025: ("yentinglin/aime_2025", None),
}
_INTEGER = re.compile(r"0*(\d{1,3})(?:\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°|degrees))?", re.ASCII)


@register("aime")
class AIME(MathTask):
    """1.0 for the right whole number, however it is marked. Options: `year` (2024 or 2025, for the hub).

    Each problem counts once, however often the file repeats it. Golds such as `073` and `336^\\circ` are the
    whole numbers that they mean.
    """

    hub_splits: ClassVar = {"test": "train", "train": "train"}
    duplicates = "first"

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.check_options(["year"])
        year = env.options.get("year", 2024)
        if year not in HUBS:
            raise ConfigError(f"env.options.year={year!r}: choose one of {', '.join(map(str, HUBS))}")
        self.hub = HUBS[year]  # type: ignore[misc]

    def gold(self, row: Row) -> str:
        text = text_or_none(row["answer"]) or ""
        found = _INTEGER.fullmatch(text.strip("$ "))
        if found is None:
            raise ConfigError(
                f"{row.place}: an answer of AIME is a whole number from 0 to 999, this is {text!r}"
            )
        return str(int(found[1]))
