"""The map in docs/architecture.md: every file of the project with the first line of its docstring.

python -m tests.house --write
"""

import ast
import gc
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map: python -m tests.house --write -->", "<!-- end of the map -->"
SCRIPTS = ("grpo.py", "grpo_async.py", "grpo_utils.py")
ROOMS = (
    "run",
    "reports",
    "rollout",
    "training",
    "evaluation",
    "monitoring",
    "envs",
    "cluster",
    "plan",
    "config",
    "selftest",
    "benchmarks",
)


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree. Without garbage collection in its middle: CPython 3.11 counts on the depth of the stack
    while it makes the tree, which callbacks of the collector (hypothesis has one) disturb."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def first_line(path: Path) -> str:
    """What a file says that it is: the first sentence of its docstring."""
    said = ast.get_docstring(parsed(path)) or ""
    return " ".join(said.split("\n\n")[0].split())


def house_map() -> str:
    """Markdown: a line a file, rooms from the top down."""
    lines = [_line(ROOT / script) for script in SCRIPTS]
    for room in ROOMS:
        lines += ["", f"### {room}/", ""]
        files = sorted((ROOT / room).rglob("*.py"), key=lambda path: (len(path.parts), path.parts))
        lines += [_line(path) for path in files if path.name != "__init__.py"]
    return "\n".join(lines)


def _line(path: Path) -> str:
    return f"- `{path.relative_to(ROOT)}`: {first_line(path)}"


def page_with_map() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{house_map()}\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with_map())
    else:
        print(house_map())
