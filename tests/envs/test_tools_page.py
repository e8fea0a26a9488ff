"""Runs the tools of docs/tools.md as they are printed."""

import asyncio
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from config.schema.env import EnvConfig
from envs.tools.tool_set import ToolResult, ToolSetFactory
from tests.script_runner import ROOT

PAGE = (ROOT / "docs" / "tools.md").read_text()
CODE_BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TOOLS, NOTEBOOK, SERVER = CODE_BLOCKS


def call_tools(path: str, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    async def use(factory: ToolSetFactory) -> list[ToolResult]:
        tools = await factory.make()
        results = [await tools.call(name, arguments) for name, arguments in calls]
        await tools.close()
        await factory.close()
        return results

    env = EnvConfig(dataset="x", max_steps=2, tools=[path])
    return asyncio.run(use(ToolSetFactory(env)))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the tools of the page as a module, and returns its name."""
    name = f"tools_of_the_page_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"{TOOLS}\n\n{NOTEBOOK}")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name)


def test_the_function_answers_with_the_texts_of_the_table(module: str) -> None:
    calls = [("capital", {"country": "Peru"}), ("capital", {"country": "Mars"}), ("capital", {"country": 3})]
    results = call_tools(f"{module}:capital", *calls, ("search", {}))
    assert [each.outcome for each in results] == ["ok", "error", "malformed", "unknown"]
    assert results[0].text == "Lima"
    for result in results[1:]:
        assert f"| `{result.outcome}` |" in PAGE and f"| `{result.text}` |" in PAGE


def test_the_class_has_notes(module: str) -> None:
    calls = [("add_note", {"text": "a"}), ("add_note", {"text": "b"}), ("read_notes", {})]
    assert [each.text for each in call_tools(f"{module}:Notebook", *calls)] == ["1 notes", "2 notes", '["a", "b"]']


def test_the_server_spells(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="pip install -e '.[mcp]' in the project's folder")
    (tmp_path / "my_server.py").write_text(SERVER)
    path = f"mcp:{shlex.join([sys.executable, str(tmp_path / 'my_server.py')])}"
    assert call_tools(path, ("spell", {"word": "abc"})) == [ToolResult("cba", "ok")]
