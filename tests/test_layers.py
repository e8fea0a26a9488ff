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
BELOW_THE_RUN = {
    "reports",
    "rollout",
    "training",
    "evaluation",
    "monitoring",
    "envs",
    "cluster",
    "plan",
    "config",
}
MAY_IMPORT = {
    "config": {"config"},
    "plan": {"plan", "config"},
    "cluster": {"cluster", "plan", "config"},
    "envs": {"envs", "plan", "config"},
    "rollout": {"rollout", "envs", "cluster", "plan", "config"},
    "training": {"training", "envs", "cluster", "plan", "config"},
    "evaluation": {"evaluation", "envs", "plan", "config"},
    "monitoring": {"monitoring", "envs", "plan", "config"},
    "reports": {"reports", "evaluation", "monitoring", "envs", "plan", "config"},
    "run": {"run", *BELOW_THE_RUN},
    "selftest": {"selftest", "grpo", "grpo_async", "grpo_utils", "run", *BELOW_THE_RUN},
}
ROOMS = set(MAY_IMPORT) | {"grpo", "grpo_async", "grpo_utils", "tests", "benchmarks"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
WITHOUT_TORCH = [
    "config",
    "plan",
    "reports",
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
    """Top-level packages that a file imports anywhere, functions included."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        wrong = (imported(path) & ROOMS) - MAY_IMPORT[room]
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


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
    named = re.findall(
        r"\b(?:config|plan|envs|rollout|training|evaluation|monitoring|reports|run|tests)/[\w/]+(?:\.py)?",
        PAGE.read_text(),
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_only_the_start_of_the_scripts_starts_the_self_test() -> None:
    files = [*ROOT.glob("*.py"), *(path for room in BELOW_THE_RUN for path in (ROOT / room).rglob("*.py"))]
    assert {path.name for path in files if "selftest" in imported(path)} == {"grpo_utils.py"}


def test_the_self_test_tells_of_a_torch_that_does_not_load() -> None:
    """Modules outside the processes of the checks import none."""
    for name in ("main", "check", "catalogue", "runner", "child"):
        assert not imported(ROOT / "selftest" / f"{name}.py") & {"torch", "transformers", "vllm", "ray"}, name
