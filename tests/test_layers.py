"""Imports point down only, and the rooms on one level never import each other."""

import ast
import gc
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SCRIPTS = {"grpo", "grpo_async", "grpo_utils"}
MAY_IMPORT = {
    "config": set(),
    "envs": {"config"},
    "torchgrpo/plan": {"envs", "config"},
    "torchgrpo/cluster": {"plan", "config"},
    "torchgrpo/batches": {"envs", "config"},
    "torchgrpo/training": {"batches", "cluster", "plan", "envs", "config"},
    "torchgrpo/rollout": {"training", "batches", "cluster", "plan", "envs", "config"},
    "torchgrpo/evaluation": {"rollout", "batches", "plan", "envs", "config"},
    "torchgrpo/monitoring": {"batches", "plan", "envs", "config"},
    "torchgrpo/reports": {"evaluation", "monitoring", "plan", "envs", "config"},
    "torchgrpo/run": {
        *("reports", "rollout", "training", "evaluation", "monitoring"),
        *("batches", "cluster", "plan", "envs", "config"),
    },
    "torchgrpo/selftest": {
        *("run", "reports", "rollout", "training", "evaluation", "monitoring"),
        *("batches", "cluster", "plan", "envs", "config"),
        *SCRIPTS,
    },
    "torchgrpo/models": set(),
}
"""The rooms that each room may import beside itself: what lies below it."""
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
WITHOUT_TORCH = [
    "config",
    "torchgrpo/plan",
    "torchgrpo/reports",
    "envs/group.py",
    "envs/task.py",
    "envs/rewards.py",
    "envs/tasks",
    "envs/tools",
    "envs/verifiers",
    "envs/judging",
    "envs/sandbox",
]


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree, made without garbage collection: CPython 3.11 counts on the depth of the stack meanwhile,
    which callbacks of the collector (hypothesis has one) disturb."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path: Path, known: set[str]) -> set[str]:
    """Known modules that a file imports anywhere, in functions and for types alone too."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & known or {node.module}
    return names & known


def imported(path: Path) -> set[str]:
    """Packages that a file imports anywhere, functions included; a room of torchgrpo by its own name."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = node.module == "torchgrpo"
            names |= {f"torchgrpo.{alias.name}" for alias in node.names} if inside else {node.module}
    return {name.removeprefix("torchgrpo.").split(".")[0] for name in names}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    own = room.removeprefix("torchgrpo/")
    rooms = {name.removeprefix("torchgrpo/") for name in MAY_IMPORT} | SCRIPTS | {"tests", "benchmarks"}
    for path in files:
        wrong = (imported(path) & rooms) - MAY_IMPORT[room] - {own}
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_every_folder_of_code_is_a_room() -> None:
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "torchgrpo").glob("*/__init__.py")}
    assert rooms | {"config", "envs", "torchgrpo/models"} == set(MAY_IMPORT)


def test_no_module_imports_itself_by_way_of_others() -> None:
    places = [*ROOT.glob("grpo*.py"), *(path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))]
    modules = {module_of(path): path for path in places}
    graph = {name: modules_imported(path, set(modules)) for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_a_config_error_and_a_task_cost_no_torch(place: str) -> None:
    for path in [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"):
        assert not imported(path) & {"torch", "tensordict", "torchrl", "transformers", "vllm"}, path


def test_the_scripts_know_only_how_they_start_and_their_schedule() -> None:
    for script in ("grpo.py", "grpo_async.py"):
        assert imported(ROOT / script) == {"run", "grpo_utils"}


@pytest.mark.parametrize("room", [*MAY_IMPORT, "benchmarks", "tests"])
def test_files_and_functions_can_be_read_at_one_go(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and room != "tests":
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{path}: {node.name}"


def test_the_files_that_the_architecture_page_names_exist() -> None:
    named = re.findall(r"\b(?:config|envs|torchgrpo|tests)/[\w/]+(?:\.(?:py|yaml))?", PAGE.read_text())
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


def test_the_self_test_tells_of_a_torch_that_does_not_load() -> None:
    """Modules outside the processes of the checks import none."""
    for name in ("main", "check", "catalogue", "runner", "child"):
        assert not imported(ROOT / "torchgrpo" / "selftest" / f"{name}.py") & {
            "torch",
            "transformers",
            "vllm",
            "ray",
        }, name


def test_the_functions_that_the_architecture_page_names_are_in_the_files_of_their_row() -> None:
    rows = [
        line.split("|")[2]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and ".py" in line
    ]
    named = [(name, row) for row in rows for name in re.findall(r"`(\w+)` in ", row)]
    assert len(named) > 8
    for name, row in named:
        files = re.findall(r"\b(?:config|envs|torchgrpo)/[\w/]+\.py", row)
        assert any(re.search(rf"\b{name}\b", (ROOT / file).read_text()) for file in files), f"{name}: {row}"
