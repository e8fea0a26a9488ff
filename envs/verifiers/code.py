"""The reward `code`: the last program of a completion, run on tests in the sandbox, compared outside it."""

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
from config.schema.values import at_least, one_of
from envs.example import Completion, Example, Reward
from envs.rewards import reward
from envs.sandbox.choice import REMOTE, Programs, check_sandbox, make_sandbox
from envs.sandbox.languages import LANGUAGES, command, named
from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import Run
from envs.verifiers.assertion_tests import Assertions, failures, is_program
from envs.verifiers.extract import after_thinking
from envs.verifiers.outputs import coati_same_output, same_output, same_value

FENCE = "```"
SHARE_OF_DEADLINE = 0.8
"""Of `env.reward_timeout_s`, for all tests of a completion; the rest is for starting and ending."""
COMPARISONS: dict[str, Callable[[str, str], bool]] = {"default": same_output, "coati": coati_same_output}
CREDITS = ("all", "share")
REMOTE_REWARD_SECONDS = 5.0
"""The least that `env.reward_timeout_s` may be with a server, so that its answer is not taken for a hanging program."""


def system_prompt(language: str) -> str:
    """System prompt that asks for a program in a language of `LANGUAGES`."""
    return (
        f"Solve the programming problem in {LANGUAGES[language].asked}, with the standard library only. Think first, "
        f"then give the whole program in one block that begins with ```{language} and ends with ```. Unless the "
        "problem names a function to write, the program reads standard input and prints the answer, and nothing else, "
        "to standard output."
    )


@dataclass(frozen=True)
class CodeOptions:
    """The keys of `env.options` that the reward `code` reads."""

    test_seconds: float = 4.0
    """CPU time of one test; it may take twice that by the clock."""
    memory_mib: int = Limits.memory_mib
    """Address space of the program."""
    credit: str = "all"
    """`all`: 1.0 if every test passes, tests end at the first that fails. `share`: all run, the share counts."""
    comparison: str = "default"
    """How printed text is compared: `default`, or `coati` as ColossalChat does."""
    max_tests: int | None = None
    """Only the first so many tests of a row are run."""
    language: str = "python"
    """Of programs whose row names none: a key of `LANGUAGES`."""
    wrapped_outputs: bool = False
    """The expected result of a function is the only element of a list, as in APPS and TACO."""

    @classmethod
    def of(cls, env: EnvConfig) -> "CodeOptions":
        """Raises ConfigError for values out of range. Other keys of `env.options` belong to the task."""
        known = {key: value for key, value in env.options.items() if key in cls.__dataclass_fields__}
        options = cls(**known)
        one_of("env.options.credit", options.credit, CREDITS)
        one_of("env.options.comparison", options.comparison, tuple(COMPARISONS))
        one_of("env.options.language", options.language, tuple(LANGUAGES))
        longest = SHARE_OF_DEADLINE * env.reward_timeout_s
        if not 0 < options.test_seconds <= longest:
            raise ConfigError(
                f"env.options.test_seconds={options.test_seconds}: must be above 0 and at most {longest:g}, "
                f"{SHARE_OF_DEADLINE:.0%} of env.reward_timeout_s={env.reward_timeout_s:g}"
            )
        if env.sandbox == REMOTE and env.reward_timeout_s < REMOTE_REWARD_SECONDS:
            raise ConfigError(
                f"env.reward_timeout_s={env.reward_timeout_s:g}: with env.sandbox=remote it must be at least "
                f"{REMOTE_REWARD_SECONDS:g}, so that a server that is slow to answer is no fault of a program"
            )
        at_least("env.options.max_tests", options.max_tests, 1)
        if options.memory_mib < 64:
            raise ConfigError(f"env.options.memory_mib={options.memory_mib}: Python needs at least 64")
        return options


@dataclass(frozen=True)
class Tests:
    """Tests of a program: inputs and expected outputs.

    inputs: texts for standard input, or with a function argument lists. outputs: what is expected of each.
    language: what the row says it is written in; None: it says nothing.
    """

    __test__ = False

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str | None = None
    language: str | None = None

    @classmethod
    def parse(cls, value: Any) -> "Tests | Assertions":
        """Read tests from a dictionary or its JSON.

        It has "inputs" and "outputs", perhaps `fn_name` and `language`; or what `Assertions` takes.

        With a function, text inputs hold one JSON argument a line and text outputs are JSON, as in LiveCodeBench.

        Raises:
            ValueError: anything else.
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
        language = named(str(value["language"])) if value.get("language") else None
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(
                f"{len(inputs)} inputs and {len(outputs)} outputs: as many of both, and some, are needed"
            )
        if function is None:
            texts = [tuple(map(_as_text, side)) for side in (inputs, outputs)]
            return cls(texts[0], texts[1], None, language)
        if language not in (None, "python"):
            raise ValueError(f"fn_name={function!r}: functions are called in Python, the row says {language}")
        if not isinstance(function, str) or not function.isidentifier():
            raise ValueError(f"fn_name={function!r} is not the name of a function")
        arguments = tuple(
            [json.loads(line) for line in each.splitlines()] if isinstance(each, str) else each
            for each in inputs
        )
        if not all(isinstance(each, list) for each in arguments):
            raise ValueError(
                "the inputs of a function must be lists of arguments, or one JSON argument a line"
            )
        results = tuple(json.loads(each) if isinstance(each, str) else each for each in outputs)
        return cls(arguments, results, function)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"a test's input and output must be text or a list of lines, this is {value!r:.80}")


def extract_code(text: str, language: str = "python") -> str | None:
    """The last block after a line such as ```` ```python ````, up to the next fence or the end.

    Without one all of the text where it is a Python program and one is asked for, else None.
    """
    lines = text.splitlines(keepends=True)
    opened = []
    for place, line in enumerate(lines):
        mark, _, words = line.strip().partition(FENCE)
        if not mark and words.split() and words.split()[0].lower() in LANGUAGES[language].names:
            opened.append(place)
    if not opened:
        return text if language == "python" and is_program(text) else None
    body = lines[opened[-1] + 1 :]
    closed = next((place for place, line in enumerate(body) if line.lstrip().startswith(FENCE)), len(body))
    code = "".join(body[:closed])
    return code if code.strip() else None


@dataclass(frozen=True)
class CodeResult:
    """Number of tests that passed, and how the first failure went wrong."""

    passed: int
    total: int
    failure: str = ""


def judge(
    sandbox: Programs, code: str, tests: Tests | Assertions, options: CodeOptions, seconds: float
) -> CodeResult:
    """Runs the tests in order, for at most `seconds` in all; those that there is no time for have failed.

    Raises:
        SandboxError: the sandbox failed, so nothing can be said about the code.
    """
    if isinstance(tests, Assertions):
        job = tests.job(options.max_tests, options.credit == "all")
        why = failures(sandbox.check(code, job, seconds), len(tests.sources[: options.max_tests]))
        return CodeResult(why.count(""), len(why), next(filter(None, why), ""))
    deadline = time.monotonic() + seconds
    passed, failure = 0, ""
    pairs = list(zip(tests.inputs, tests.outputs, strict=True))[: options.max_tests]
    for given, expected in pairs:
        left = deadline - time.monotonic()
        if left <= 0:
            return CodeResult(passed, len(pairs), failure or "no time left")
        if tests.function is None:
            run = sandbox.run(code, given.encode(), left)
        else:
            run = sandbox.call(code, tests.function, given, left)
        wrong = _failure(run, expected, options, tests.function is not None)
        passed += not wrong
        failure = failure or wrong
        if wrong and options.credit == "all":
            break
    return CodeResult(passed, len(pairs), failure)


def _failure(run: Run, expected: Any, options: CodeOptions, of_function: bool) -> str:
    """Empty if the test passes, else why not."""
    if not run.succeeded:
        return run.status if run.status != "finished" else f"exit code {run.code}"
    if of_function:
        try:
            value = json.loads(run.value)
        except (ValueError, RecursionError):  # not JSON, or numbers and nesting beyond what JSON readers take
            return "wrong answer"
        if options.wrapped_outputs and isinstance(expected, list) and len(expected) == 1:
            expected = expected[0]
        right = same_value(value, expected)
    else:
        right = COMPARISONS[options.comparison](run.stdout.decode(errors="replace"), expected)
    return "" if right else "wrong answer"


_sandboxes: dict[tuple[object, ...], Programs] = {}


def _sandbox(env: EnvConfig, options: CodeOptions, language: str) -> Programs:
    """One for each process and language, so that it is started once; it ends with the process at the latest."""
    key = (os.getpid(), env.sandbox, env.sandbox_url, options, language)
    if key not in _sandboxes:
        seconds = options.test_seconds
        limits = Limits(2 * seconds, math.ceil(seconds), options.memory_mib)
        _sandboxes[key] = make_sandbox(env, limits, language)
        atexit.register(_sandboxes[key].close)
    return _sandboxes[key]


def check_programs(env: EnvConfig, answers: Iterable[Any]) -> None:
    """Checks what judging programs on these tests needs, at the start of a run.

    Raises:
        ConfigError: an option out of range; the sandbox cannot run one of their languages.
    """
    options = CodeOptions.of(env)
    for language in {language_of(Tests.parse(answer), options) for answer in answers}:
        if language != options.language:  # else the worker processes check it
            check_sandbox(env, language)
        elif env.sandbox != REMOTE:
            command(language)


def warm_up(env: EnvConfig) -> None:
    """Finds out whether programs run here, so that processes forked later need not."""
    check_sandbox(env, CodeOptions.of(env).language)


def language_of(tests: Tests | Assertions, options: CodeOptions) -> str:
    """Language of a program for these tests."""
    if isinstance(tests, Assertions) or tests.function is not None:
        return "python"
    return tests.language or options.language


@reward("code", system_prompt=system_prompt("python"))
def code_reward(completion: Completion, example: Example, env: EnvConfig) -> Reward:
    """Parts: `accuracy` (every test passes), `tests` (share that passed before judging ended), `format` (a block).

    A completion without a program is invalid. `example.answer`: see `Tests.parse`.

    Raises:
        SandboxError: counted as an error by the reward service.
        ValueError: the row has no usable tests.
    """
    options = CodeOptions.of(env)
    tests = Tests.parse(example.answer)
    spoken = after_thinking(completion.full_text)
    language = language_of(tests, options)
    code = extract_code(spoken, language) if spoken is not None else None
    if code is None:
        return Reward(0.0, {"accuracy": 0.0, "tests": 0.0, "format": 0.0}, "invalid")
    sandbox = _sandbox(env, options, language)
    result = judge(sandbox, code, tests, options, SHARE_OF_DEADLINE * env.reward_timeout_s)
    accuracy, share = float(result.passed == result.total), result.passed / result.total
    score = accuracy if options.credit == "all" else share
    return Reward(score, {"accuracy": accuracy, "tests": share, "format": 1.0})
