"""Checks the layers of packages: imports point down, never sideways or in circles."""

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
"""The packages that each package may import: those of the layers below."""
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
WITHOUT_TORCH = [
    "config",
    "torchgrpo/plan",
    "torchgrpo/reports",
    "envs/group.py",
    "envs/task.py",
    "envs/rewards.py",
    "envs/tasks",
    "envs/agents",
    "envs/tools",
    "envs/verifiers",
    "envs/reward_workers",
    "envs/sandbox",
]


@cache
def parse_file(path: Path) -> ast.Module:
    """Returns a file's syntax tree, parsed without garbage collection.

    CPython 3.11 relies on the stack depth while it builds the tree; callbacks of the collector, such as that of
    hypothesis, disturb this depth.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path: Path, known_modules: set[str]) -> set[str]:
    """Returns the known modules that a file imports, also in functions or only for types."""
    names: set[str] = set()
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & known_modules or {node.module}
    return names & known_modules


def packages_imported(path: Path) -> set[str]:
    """Returns the packages that a file imports; of torchgrpo, its subpackages."""
    names: set[str] = set()
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            is_root = node.module == "torchgrpo"
            names |= {f"torchgrpo.{alias.name}" for alias in node.names} if is_root else {node.module}
    return {name.removeprefix("torchgrpo.").split(".")[0] for name in names}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_lower_layers(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    own_name = package.removeprefix("torchgrpo/")
    packages = {name.removeprefix("torchgrpo/") for name in MAY_IMPORT} | SCRIPTS | {"tests", "benchmarks"}
    for path in files:
        wrong = (packages_imported(path) & packages) - MAY_IMPORT[package] - {own_name}
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_every_folder_of_code_has_a_layer() -> None:
    packages = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "torchgrpo").glob("*/__init__.py")}
    assert packages | {"config", "envs", "torchgrpo/models"} == set(MAY_IMPORT)


def test_no_module_imports_itself_through_others() -> None:
    files = [*ROOT.glob("grpo*.py"), *(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))]
    modules = {module_name(path): path for path in files}
    graph = {name: modules_imported(path, set(modules)) for name, path in modules.items()}
    assert sum(map(len, graph.values())) > len(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("path", WITHOUT_TORCH)
def test_config_errors_and_tasks_import_no_torch(path: str) -> None:
    for file in [ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"):
        assert not packages_imported(file) & {"torch", "tensordict", "torchrl", "transformers", "vllm"}, file


def test_the_scripts_import_only_their_launcher_and_schedule() -> None:
    for script in ("grpo.py", "grpo_async.py"):
        assert packages_imported(ROOT / script) == {"run", "grpo_utils"}


@pytest.mark.parametrize("package", [*MAY_IMPORT, "benchmarks", "tests"])
def test_files_and_functions_are_short(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and package != "tests":
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{path}: {node.name}"


def test_the_files_that_the_architecture_page_names_exist() -> None:
    named = re.findall(r"\b(?:config|envs|torchgrpo|tests)/[\w/]+(?:\.(?:py|yaml|js))?", PAGE.read_text())
    missing = [name for name in named if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


def test_the_self_test_imports_torch_only_in_check_processes() -> None:
    """The self-test can therefore report a torch that does not load."""
    for name in ("main", "check", "catalogue", "runner", "child"):
        assert not packages_imported(ROOT / "torchgrpo" / "selftest" / f"{name}.py") & {
            "torch",
            "transformers",
            "vllm",
            "ray",
        }, name


def test_the_functions_that_the_architecture_page_names_are_in_the_files_of_their_row() -> None:
    rows = [line.split("|")[2] for line in PAGE.read_text().splitlines() if line.startswith("| ") and ".py" in line]
    named = [(name, row) for row in rows for name in re.findall(r"`(\w+)` in ", row)]
    assert len(named) > 8
    for name, row in named:
        files = re.findall(r"\b(?:config|envs|torchgrpo)/[\w/]+\.py", row)
        assert any(re.search(rf"\b{name}\b", (ROOT / file).read_text()) for file in files), f"{name}: {row}"
