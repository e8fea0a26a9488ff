"""Reward `code`, which reads tests of a row and runs a completion's program on them.

The outputs are compared outside the sandbox.
"""

import atexit
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from config.schema.values import check_choice, check_minimum
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.sandbox.languages import LANGUAGES, find_language, interpreter_command
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import ProgramResult
from envs.sandbox.sandbox_selection import REMOTE, ProgramRunner, check_sandbox, make_sandbox
from envs.verifiers.assertion_tests import Assertions, failure_reasons, is_program
from envs.verifiers.extract import text_after_thinking
from envs.verifiers.outputs import coati_same_output, same_output, same_value

FENCE = "```"
"""Fence of a code block in Markdown."""
SHARE_OF_DEADLINE = 0.8
"""Share of `env.reward_timeout_s` for all tests of a completion; the rest is for process start and end."""
COMPARISONS: dict[str, Callable[[str, str], bool]] = {"default": same_output, "coati": coati_same_output}
"""Comparison functions of printed output by their name in `env.options.comparison`."""
CREDITS = ("all", "share")
MIN_REMOTE_TIMEOUT_S = 5.0
"""Minimum `env.reward_timeout_s` with a sandbox server, whose delay must not look like a hanging program."""


def system_prompt(language: str) -> str:
    """Returns the system prompt that requests a program in a language of `LANGUAGES`."""
    return (
        f"Solve the programming problem in {LANGUAGES[language].prompt_name}, with the standard library only. "
        f"Think first, then give the whole program in one block that begins with ```{language} and ends with ```. "
        "Unless the problem names a function to write, the program reads standard input and prints the answer, "
        "and nothing else, to standard output."
    )


@dataclass(frozen=True)
class CodeOptions:
    """Options of `env.options` that the reward `code` reads."""

    test_seconds: float = 4.0
    """CPU time of one test; the wall-clock limit is twice as long."""
    memory_mib: int = Limits.memory_mib
    """Address space of the program in MiB."""
    credit: str = "all"
    """Credit for tests that pass.

    `all`: the score is 1.0 if every test passes, and testing stops at the first failure.
    `share`: all tests run, and the score is the share that passes.
    """
    comparison: str = "default"
    """Comparison of printed text: `default`, or `coati` for the rules of ColossalChat."""
    max_tests: int | None = None
    """Maximum number of tests of a row to run, from the first."""
    language: str = "python"
    """Language of the program if the row names none: a key of `LANGUAGES`."""
    wrapped_outputs: bool = False
    """Whether the expected result of a function is the only element of a list, as in APPS and TACO."""

    @classmethod
    def from_config(cls, env: EnvConfig) -> "CodeOptions":
        """Reads the options from `env.options`; other keys there belong to the task.

        Raises:
            ConfigError: A value is out of range.
        """
        known = {key: value for key, value in env.options.items() if key in cls.__dataclass_fields__}
        options = cls(**known)
        check_choice("env.options.credit", options.credit, CREDITS)
        check_choice("env.options.comparison", options.comparison, tuple(COMPARISONS))
        check_choice("env.options.language", options.language, tuple(LANGUAGES))
        longest = SHARE_OF_DEADLINE * env.reward_timeout_s
        if not 0 < options.test_seconds <= longest:
            raise ConfigError(
                f"env.options.test_seconds={options.test_seconds}: must be above 0 and at most {longest:g}, "
                f"{SHARE_OF_DEADLINE:.0%} of env.reward_timeout_s={env.reward_timeout_s:g}"
            )
        if env.sandbox == REMOTE and env.reward_timeout_s < MIN_REMOTE_TIMEOUT_S:
            raise ConfigError(
                f"env.reward_timeout_s={env.reward_timeout_s:g}: with env.sandbox=remote it must be at least "
                f"{MIN_REMOTE_TIMEOUT_S:g}, so that a slow server does not look like a program that hangs"
            )
        check_minimum("env.options.max_tests", options.max_tests, 1)
        if options.memory_mib < 64:
            raise ConfigError(f"env.options.memory_mib={options.memory_mib}: must be at least 64, which Python needs")
        return options


@dataclass(frozen=True)
class Tests:
    """Tests of a program: inputs and expected outputs.

    inputs: texts for standard input; lists of arguments if `function` is set.
    outputs: the expected output for every input.
    function: name of the function to call; None for a program that reads standard input.
    language: the program's language that the row names; None if the row names none.
    """

    __test__ = False

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str | None = None
    language: str | None = None

    @classmethod
    def parse(cls, value: Any) -> "Tests | Assertions":
        """Parses tests from a dictionary or its JSON text.

        The dictionary has "inputs" and "outputs", and may have `fn_name` and `language`; or it has the columns
        that `Assertions.parse` reads. With a function, text inputs hold one JSON argument per line and text
        outputs are JSON, as in LiveCodeBench.

        Raises:
            ValueError: The value has another format.
        """
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, dict) and not value.keys().isdisjoint(("test", "test_list")):
            return Assertions.parse(value)
        if not isinstance(value, dict) or not all(
            isinstance(value.get(key), Sequence) for key in ("inputs", "outputs")
        ):
            raise ValueError(
                'tests must be {"inputs": [...], "outputs": [...]}, {"test": code} or {"test_list": [code, ...]}'
            )
        inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name")
        language = find_language(str(value["language"])) if value.get("language") else None
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: the numbers must be equal and above 0")
        if function is None:
            texts = [tuple(map(_as_text, side)) for side in (inputs, outputs)]
            return cls(texts[0], texts[1], None, language)
        if language not in (None, "python"):
            raise ValueError(
                f"fn_name={function!r}: a function is called in Python, but the row has the language {language}"
            )
        if not isinstance(function, str) or not function.isidentifier():
            raise ValueError(f"fn_name={function!r} is not the name of a function")
        arguments = tuple(
            [json.loads(line) for line in each.splitlines()] if isinstance(each, str) else each for each in inputs
        )
        if not all(isinstance(each, list) for each in arguments):
            raise ValueError("the inputs of a function must be lists of arguments, or one JSON argument a line")
        results = tuple(json.loads(each) if isinstance(each, str) else each for each in outputs)
        return cls(arguments, results, function)


def _as_text(value: Any) -> str:
    """Returns a test's input or output as text; a list of lines is joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"a test's input and output must be text or a list of lines, but is {value!r:.80}")


def extract_code(text: str, language: str = "python") -> str | None:
    """Extracts the last fenced block of a language from a completion.

    The block begins after a line such as ```` ```python ```` and ends at the next fence or the end of the text.
    Without a block, the whole text is returned if Python is expected and the text is a Python program;
    otherwise None.
    """
    lines = text.splitlines(keepends=True)
    opening_lines = []
    for place, line in enumerate(lines):
        mark, _, words = line.strip().partition(FENCE)
        if not mark and words.split() and words.split()[0].lower() in LANGUAGES[language].names:
            opening_lines.append(place)
    if not opening_lines:
        return text if language == "python" and is_program(text) else None
    body = lines[opening_lines[-1] + 1 :]
    end = next((place for place, line in enumerate(body) if line.lstrip().startswith(FENCE)), len(body))
    code = "".join(body[:end])
    return code if code.strip() else None


@dataclass(frozen=True)
class CodeResult:
    """Number of tests that passed, number of tests, and reason of the first failure."""

    num_passed: int
    num_tests: int
    failure: str = ""


def run_tests(
    sandbox: ProgramRunner, code: str, tests: Tests | Assertions, options: CodeOptions, seconds: float
) -> CodeResult:
    """Runs the tests in order, for at most `seconds` in all.

    Tests that the time does not suffice for have failed.

    Raises:
        SandboxError: The sandbox failed, so there is no verdict about the code.
    """
    if isinstance(tests, Assertions):
        test_job = tests.sandbox_job(options.max_tests, options.credit == "all")
        reasons = failure_reasons(sandbox.run_tests(code, test_job, seconds), len(tests.sources[: options.max_tests]))
        return CodeResult(reasons.count(""), len(reasons), next(filter(None, reasons), ""))
    deadline = time.monotonic() + seconds
    num_passed, failure = 0, ""
    pairs = list(zip(tests.inputs, tests.outputs, strict=True))[: options.max_tests]
    for test_input, expected in pairs:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return CodeResult(num_passed, len(pairs), failure or "no time left")
        if tests.function is None:
            run = sandbox.run(code, test_input.encode(), seconds_left)
        else:
            run = sandbox.call_function(code, tests.function, test_input, seconds_left)
        reason = _failure_reason(run, expected, options, tests.function is not None)
        num_passed += not reason
        failure = failure or reason
        if reason and options.credit == "all":
            break
    return CodeResult(num_passed, len(pairs), failure)


def _failure_reason(run: ProgramResult, expected: Any, options: CodeOptions, is_function: bool) -> str:
    """Returns why a test failed; empty if the test passed."""
    if not run.is_success:
        return run.status if run.status != "finished" else f"exit code {run.code}"
    if is_function:
        try:
            value = json.loads(run.value)
        except (ValueError, RecursionError):  # no JSON, or beyond the limits of the JSON reader
            return "wrong answer"
        if options.wrapped_outputs and isinstance(expected, list) and len(expected) == 1:
            expected = expected[0]
        right = same_value(value, expected)
    else:
        right = COMPARISONS[options.comparison](run.stdout.decode(errors="replace"), expected)
    return "" if right else "wrong answer"


_sandboxes: dict[tuple[object, ...], ProgramRunner] = {}


def _cached_sandbox(env: EnvConfig, options: CodeOptions, language: str) -> ProgramRunner:
    """Returns the sandbox of this process for a language, started once.

    The sandbox is closed with the process at the latest.
    """
    key = (os.getpid(), env.sandbox, env.sandbox_url, options, language)
    if key not in _sandboxes:
        seconds = options.test_seconds
        limits = Limits(2 * seconds, math.ceil(seconds), options.memory_mib)
        _sandboxes[key] = make_sandbox(env, limits, language)
        atexit.register(_sandboxes[key].close)
    return _sandboxes[key]


def check_programs(env: EnvConfig, answers: Iterable[Any]) -> None:
    """Checks at the start of a run that programs can run on these tests.

    Raises:
        ConfigError: An option is out of range, or the sandbox cannot run a language of the tests.
    """
    options = CodeOptions.from_config(env)
    for language in {language_of(Tests.parse(answer), options) for answer in answers}:
        if language != options.language:  # the worker processes check `options.language`
            check_sandbox(env, language)
        elif env.sandbox != REMOTE:
            interpreter_command(language)


def warm_up(env: EnvConfig) -> None:
    """Checks the sandbox once, so that processes forked later skip the check."""
    check_sandbox(env, CodeOptions.from_config(env).language)


def language_of(tests: Tests | Assertions, options: CodeOptions) -> str:
    """Returns the language of a program for these tests."""
    if isinstance(tests, Assertions) or tests.function is not None:
        return "python"
    return tests.language or options.language


@reward("code", system_prompt=system_prompt("python"))
def code_reward(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """Scores a completion by running its program on the tests in `example.answer`.

    Components: `accuracy` (every test passes), `tests` (share that passed before testing ended), `format` (the
    completion has a code block). A completion without a program is invalid. `Tests.parse` reads `example.answer`.

    Raises:
        SandboxError: The sandbox failed; the reward service counts an error.
        ValueError: The row has no usable tests.
    """
    options = CodeOptions.from_config(env)
    tests = Tests.parse(example.answer)
    answer_text = text_after_thinking(completion.full_text)
    language = language_of(tests, options)
    code = extract_code(answer_text, language) if answer_text is not None else None
    if code is None:
        return Reward(0.0, {"accuracy": 0.0, "tests": 0.0, "format": 0.0}, "invalid")
    sandbox = _cached_sandbox(env, options, language)
    result = run_tests(sandbox, code, tests, options, SHARE_OF_DEADLINE * env.reward_timeout_s)
    accuracy, share = float(result.num_passed == result.num_tests), result.num_passed / result.num_tests
    score = accuracy if options.credit == "all" else share
    return Reward(score, {"accuracy": accuracy, "tests": share, "format": 1.0})
