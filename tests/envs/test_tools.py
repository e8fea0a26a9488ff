"""Tests of tools in their native form: schemas, calls, outcomes and state."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from config.schema.errors import ConfigError
from envs.tools.arguments import ArgumentCheck
from envs.tools.results import shorten_result
from envs.tools.tool_set import ToolResult, ToolSetFactory, check_tools
from tests.envs import user_tools
from tests.envs.native_tools import MODULE, call_tools, function_of, tool_env, with_tools
from tests.log_capture import LogCapture
from tests.script_runner import ENVIRONMENT, ROOT, run_python


@pytest.fixture(autouse=True)
def _release_calls() -> Iterator[None]:
    user_tools.release.clear()
    yield
    user_tools.release.set()


def test_a_schema_is_that_of_transformers_and_names_all_parameters() -> None:
    expected = get_json_schema(user_tools.capital)["function"]
    function = function_of(tool_env("capital"), "capital")
    assert function["description"] == expected["description"] == "Looks up the capital of a country."
    assert function["parameters"] == expected["parameters"]


def test_a_parameter_needs_no_description() -> None:
    assert function_of(tool_env("double"), "double") == {
        "name": "double",
        "description": "Doubles a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}, "note": {"type": "string", "nullable": True}},
            "required": ["number"],
        },
    }


def test_built_in_tools_have_schemas_and_answer() -> None:
    env = tool_env("calculator", "python")
    assert function_of(env, "calculator")["parameters"]["required"] == ["expression"]
    assert function_of(env, "python")["parameters"]["required"] == ["code"]
    assert function_of(env, "python")["description"].startswith("You have a Python interpreter")
    calculations = [("calculator", {"expression": "6*7"}), ("calculator", {"expression": "1/0"})]
    assert call_tools(tool_env("calculator"), *calculations) == [
        ToolResult("42", "ok"), ToolResult("error: division by zero", "ok"),
    ]  # fmt: skip


def test_python_runs_in_the_sandbox_for_several_episodes() -> None:
    from envs.sandbox.sandbox import LEVELS, unavailable_reason

    if all(unavailable_reason(level) for level in LEVELS):
        pytest.skip("no sandbox works here")

    async def use(factory: ToolSetFactory) -> list[ToolResult]:
        sets = [await factory.make() for _ in range(3)]
        results = await asyncio.gather(*(each.call("python", {"code": f"print({n})"}) for n, each in enumerate(sets)))
        for each in sets:
            await each.close()
        return [*results, await (await factory.make()).call("python", {"code": "print('a' * 9000)"})]

    *first, long = with_tools(tool_env("python", tool_result_characters=200), use)
    assert [each.text for each in first] == ["0", "1", "2"]
    assert len(long.text) == 200 and "characters cut" in long.text


def test_functions_are_called_with_their_arguments() -> None:
    results = call_tools(
        tool_env("capital", "double", "traced_echo"),
        ("capital", {"country": "Peru"}),
        ("capital", {"country": "Peru", "form": "long"}),
        ("double", {"number": 4, "note": None}),
        ("traced_echo", {"word": "yes"}),
    )
    assert [each.text for each in results] == [
        "Lima", "Lima is the capital of Peru.", '{"number": 8, "note": null}', "yes",
    ]  # fmt: skip
    assert {each.outcome for each in results} == {"ok"}


@pytest.mark.parametrize(("kind", "expected"), [
    ("none", "(no result)"), ("number", "3.5"), ("half a character", "a?b"), ("list", '["é", null]'),
    ("date", '["2000-01-02"]'),
])  # fmt: skip
def test_any_value_is_text(kind: str, expected: str) -> None:
    assert call_tools(tool_env("values"), ("values", {"kind": kind})) == [ToolResult(expected, "ok")]


@pytest.mark.parametrize("limit", [100, 101, 2000])
def test_a_long_result_shows_its_cut(limit: int) -> None:
    (result,) = call_tools(tool_env("values", tool_result_characters=limit), ("values", {"kind": "long"}))
    head, cut, tail = result.text.split("\n")
    assert limit - 1 <= len(result.text) <= limit and result.outcome == "ok"
    assert cut == f"[... {100_001 - len(head) - len(tail)} characters cut ...]"
    assert abs(len(head) - len(tail)) <= 1 and tail.endswith("z")
    assert shorten_result(result.text, limit) == result.text


def test_the_limit_has_room_for_the_cut() -> None:
    with pytest.raises(ConfigError, match=r"env\.tool_result_characters=99: must be at least 100"):
        tool_env("values", tool_result_characters=99)


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("capital", {}, "'country' is a required property"),
    ("capital", {"country": 3}, "argument country: 3 is not of type 'string'"),
    ("capital", {"country": "Peru", "form": "odd"}, "argument form: 'odd' is not one of ['short', 'long']"),
    ("capital", {"country": "Peru", "city": "Lima"}, "Additional properties are not allowed ('city' was unexpected)"),
    ("double", {"number": "4"}, "argument number: '4' is not of type 'integer'"),
    ("double", {"number": True}, "argument number: True is not of type 'integer'"),
    ("double", ["4"], "the arguments must be an object, but are list"),
])  # fmt: skip
def test_malformed_arguments_are_answered(name: str, arguments: Any, message: str) -> None:
    (result,) = call_tools(tool_env("capital", "double"), (name, arguments))
    assert result == ToolResult(f"error: {message}", "malformed")


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    (result, long) = call_tools(tool_env("capital", "double"), ("search", {}), ("\ud800" * 9000, {}))
    assert result == ToolResult("error: there is no tool 'search'; the tools are: capital, double", "unknown")
    assert long.outcome == "unknown" and len(long.text) == 2000 and long.text.encode()


@pytest.mark.parametrize(("name", "kind", "message"), [
    ("failures", "", "OSError: no ? such index"), ("failures", "exit", "SystemExit: 3"),
    ("failures", "unreadable", "UnreadableError: (its message cannot be read)"),
    ("failures", "circle", "ValueError: Circular reference detected"),
    ("async_failures", "", "OSError: no such index"), ("async_failures", "exit", "SystemExit: 3"),
    ("async_failures", "cancelled", "CancelledError"),
])  # fmt: skip
def test_any_exception_is_answered(name: str, kind: str, message: str) -> None:
    assert call_tools(tool_env(name), (name, {"kind": kind})) == [ToolResult(f"error: {message}", "error")]


def test_the_first_failure_of_a_tool_is_logged_with_its_place(log_capture: LogCapture) -> None:
    call_tools(tool_env("capital", "failures"), *[("capital", {"country": "Mars"})] * 3, ("failures", {"kind": ""}))
    first, second = log_capture.messages
    assert "tool capital failed, and the model reads the error: KeyError: 'Mars'" in first
    assert f"({user_tools.__file__}:{user_tools.capital.__code__.co_firstlineno + 10})" in first
    assert "tool failures failed" in second


@pytest.mark.parametrize("name", ["hang", "async_hang"])
def test_a_call_beyond_its_deadline_is_answered(name: str) -> None:
    async def use(factory: ToolSetFactory) -> ToolResult:
        result = await (await factory.make()).call(name, {})
        user_tools.release.set()  # the coroutine refuses to be cancelled, and asyncio.run would wait for it
        return result

    expected = ToolResult("error: took longer than 0.1 s", "timeout")
    assert with_tools(tool_env(name, seconds=0.1), use) == expected


def test_a_thread_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(factory: ToolSetFactory) -> list[ToolResult]:
        tools = await factory.make()

        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            results = [await tools.call("capital", {"country": "Peru"})]
        return [*results, await tools.call("capital", {"country": "Peru"})]

    first, second = with_tools(tool_env("capital"), use)
    assert first == ToolResult("error: RuntimeError: can't start new thread", "error")
    assert second == ToolResult("Lima", "ok")


def nested_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(("parameters", "arguments", "problem"), [
    ({"type": "object"}, {"a": 1}, None),
    ({"type": "object", "properties": {}}, {"a": 1}, "Additional properties are not allowed ('a' was unexpected)"),
    ({"type": "object", "properties": {}, "additionalProperties": True}, {"a": 1}, None),
    ({"type": "object", "properties": {}, "anyOf": [{"required": ["b"]}]}, {"b": 1}, None),
    ({"$defs": {"word": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/word"}}}, {"a": 1},
     "argument a: 1 is not of type 'string'"),
    ({"properties": {"a": {"$ref": "http://127.0.0.1:1/schema"}}}, {"a": 1}, None),
    ({"properties": {"a": {"type": "string"}}}, {"a": nested_list(100_000)}, "the arguments are nested too deeply"),
    ({"properties": {"a": {"type": "array", "items": {"type": "string", "nullable": True}}}}, {"a": ["b", None]}, None),
])  # fmt: skip
def test_any_schema_of_a_server_is_checked(parameters: Any, arguments: Any, problem: str | None) -> None:
    check = ArgumentCheck("env.tools=mcp:x", {"function": {"name": "f", "parameters": parameters}})
    assert check.problem(arguments) == problem


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.tools=mcp:x: the parameters of f are no JSON schema: 'text' is not"):
        ArgumentCheck("env.tools=mcp:x", {"function": {"name": "f", "parameters": {"type": "text"}}})


def test_other_calls_go_on_while_one_hangs() -> None:
    async def use(factory: ToolSetFactory) -> list[str]:
        tools = await factory.make()
        waiting_call = asyncio.ensure_future(tools.call("hang", {}))
        answers = [(await tools.call("capital", {"country": "Peru"})).text for _ in range(3)]
        assert not waiting_call.done()
        user_tools.release.set()
        return [*answers, (await waiting_call).text]

    assert with_tools(tool_env("hang", "capital"), use) == ["Lima", "Lima", "Lima", "released"]


def test_a_cancelled_call_raises_and_its_coroutine_ends() -> None:
    async def use(factory: ToolSetFactory) -> set[str]:
        tools = await factory.make()
        calls = [asyncio.ensure_future(tools.call(name, {})) for name in ("hang", "slow_coroutine")]
        await user_tools.slow_coroutine_runs.wait()
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        await tools.close()
        await asyncio.sleep(0)
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert with_tools(tool_env("hang", "slow_coroutine"), use) == set()
    gc.collect()  # a task whose exception nobody reads would log


def test_a_tool_that_hangs_does_not_keep_the_process_alive(tmp_path: Any) -> None:
    (tmp_path / "script.py").write_text(
        "from tests.envs.native_tools import call_tools, tool_env\n"
        "print(call_tools(tool_env('hang', seconds=0.2), ('hang', {})))\n"
    )
    done = run_python([str(tmp_path / "script.py")], ROOT, {**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "outcome='timeout'" in done.stdout


def test_a_coroutine_that_holds_the_loop_is_named_once(log_capture: LogCapture) -> None:
    results = call_tools(tool_env("blocking"), *[("blocking", {"seconds": 0.3})] * 2)
    assert [each.text for each in results] == ["done", "done"]
    (message,) = log_capture.messages
    assert f"tool blocking ({user_tools.__file__}) blocks the event loop for more than 0.1 s" in message
    assert "write def instead of async def" in message


@pytest.mark.parametrize(("name", "message"), [
    ("without_docstring", "without_docstring has no docstring, so the tool has no description; write it like"),
    ("only_arguments", "only_arguments has no docstring"),
    ("without_annotation", "the parameter word of without_annotation has no annotation; write it like"),
    ("any_arguments", r"any_arguments takes \*\*words: str, which has no schema; give every parameter a name"),
    ("wrong_type", r"the parameter day of wrong_type has the type <class 'datetime\.date'>, which JSON does not have"),
    ("wrong_type_inside", "the parameter days of wrong_type_inside has the type"),
    ("unknown_type", "the annotations of unknown_type fail: NameError: name 'Nowhere' is not defined"),
    ("bad_choices", "no schema for bad_choices: .*write it like"),
    ("WithoutDocstrings", "no public method of the class has a docstring; write a docstring"),
    ("WrongMethod", "the parameter place of look has no annotation"),
    ("TwoArguments", r"the constructor takes \(env, size\); let it take nothing, or the env section"),
    ("not_a_tool", "3 is neither a function nor a class"),
    ("nothing", "has no 'nothing'"),
])  # fmt: skip
def test_an_invalid_tool_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.tools={MODULE}:{name}: .*{message}"):
        check_tools(tool_env(name))


def test_a_class_that_cannot_be_made_is_refused_at_the_start() -> None:
    check_tools(tool_env("Unmakable"))
    message = r"env\.tools=.*Unmakable: creating the tool failed: OSError: no such index \(user_tools\.py:\d+\)"
    with pytest.raises(ConfigError, match=message):
        ToolSetFactory(tool_env("Unmakable"))


@pytest.mark.parametrize("names", [("capital", "capital"), ("Notebook", "BiggerNotebook")])
def test_two_tools_of_one_name_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"two tools are called \w+; give each tool its own name"):
        check_tools(tool_env(*names))


def test_the_format_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"env\.tool_format='xml': choose one of native, tags"):
        tool_env("capital", tool_format="xml")
