"""Task `aime`: problems of AIME 2024 and 2025, for evaluation.

Each year has thirty problems with whole-number answers from 0 to 999.
"""

import re
from typing import ClassVar

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.data import Row
from envs.task import register
from envs.tasks.math_task import MathTask, text_or_none

HUB_DATASETS: dict[int, tuple[str, str | None]] = {
    2024: ("HuggingFaceH4/aime_2024", None),
    2025: ("yentinglin/aime_2025", None),
}
_INTEGER = re.compile(r"0*(\d{1,3})(?:\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|°|degrees))?", re.ASCII)


@register("aime")
class AIME(MathTask):
    """Task with reward 1.0 for the correct whole number.

    Options: `year` (2024 or 2025, for the hub). Repeated problems count once. Reference answers such as `073` and
    `336^\\circ` become plain whole numbers.
    """

    hub_splits: ClassVar = {"test": "train", "train": "train"}
    duplicates = "first"

    def __init__(self, env: EnvConfig) -> None:
        super().__init__(env)
        self.check_options(["year"])
        year = env.options.get("year", 2024)
        if year not in HUB_DATASETS:
            raise ConfigError(f"env.options.year={year!r}: choose one of {', '.join(map(str, HUB_DATASETS))}")
        self.hub = HUB_DATASETS[year]  # type: ignore[misc]

    def reference_answer(self, row: Row) -> str:
        """Returns the reference answer as a whole number. Raises ConfigError for other answers."""
        text = text_or_none(row["answer"]) or ""
        found = _INTEGER.fullmatch(text.strip("$ "))
        if found is None:
            raise ConfigError(f"{row.place}: an answer of AIME must be a whole number from 0 to 999, but is {text!r}")
        return str(int(found[1]))
