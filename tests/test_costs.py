"""tests/costs.py names files that exist, and every file that starts an engine."""

import re

from tests.conftest import HERE, file_of, in_turns
from tests.costs import ENGINE, SLOW

STARTS = re.compile(
    r"local_ray|start_engine|started_engines|RayCluster|RayPool\(|VLLMEngine\(|run_job\(|"
    r"from tests\.scripts import.*\b(?:start|start_fresh|begin|ended|finish)\b"
)
FILES = {file_of(path): path for path in HERE.rglob("test_*.py") if path.name != "test_costs.py"}


def test_each_row_is_a_file_and_has_one_kind() -> None:
    assert set(ENGINE) | set(SLOW) <= set(FILES)
    assert not set(ENGINE) & set(SLOW)


def test_what_starts_an_engine_is_not_quick() -> None:
    starting = {name for name, path in FILES.items() if STARTS.search(path.read_text())}
    unlisted = starting - set(ENGINE) - {name for name in FILES if name.startswith("gpu/")}
    assert not unlisted, f"a row in tests/costs.py is missing for {unlisted}"
    assert "test_grpo.py" in starting


def test_kinds_take_turns_and_the_longest_come_first() -> None:
    assert in_turns({"a": 6, "b": 3, "c": 1}, {"x": 5, "y": 5}) == ["a", "x", "y", "b", "c"]
