"""Fuzz tests of overrides, data files and rewards: each command trains or prints one message.

The inputs are deterministic. FUZZ_EXAMPLES=N sets the number of inputs of each test.
"""

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from config.schema.config import Config
from tests.fuzz.commands import CommandResult, run_command

pytestmark = pytest.mark.long
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
SLOWER = 4
"""Factor by which fewer rewards are tried, since rewards that sleep or die take longer."""
fuzz = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def check_cases(
    cases: st.SearchStrategy[Any], run: Callable[[Any, Path], CommandResult], examples: int = EXAMPLES
) -> None:
    """Runs `examples` cases and fails at the end with all violations."""
    violations: list[str] = []
    outcomes: dict[str, int] = {}

    @seed(11)
    @settings(fuzz, max_examples=examples)
    @given(cases)
    def run_case(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            result = run(case, Path(folder))
            kind = "still running" if result.code is None else f"exit {result.code}"
            outcomes[kind] = outcomes.get(kind, 0) + 1
            violation = result.violation
            if violation is None and result.code == 0 and not result.has_gradient_step:
                violation = "exit 0 with nothing trained"
            if violation is not None:
                violations.append(f"--- {violation}: {case!r}\n{result.output[-1500:]}")

    run_case()
    print(f"\n{sum(outcomes.values())} commands: {outcomes}")
    assert not violations, f"{len(violations)} of {sum(outcomes.values())}:\n" + "\n".join(violations)


def dotted_keys(section: type, prefix: str = "") -> Iterator[str]:
    for field in fields(section):
        kind = field.default_factory if callable(field.default_factory) else field.type
        if is_dataclass(kind):
            yield from dotted_keys(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name


# Keys that take minutes for any value: clusters, engines, and the other jobs.
EXCLUDED_KEYS = {"run", "ray.enabled", "ray.address", "inference_model.backend", "env.reward_timeout_s"}
KEYS = sorted(set(dotted_keys(Config)) - EXCLUDED_KEYS)
STRANGE_VALUES = (
    *("null", "true", "false", "''", "' '", "auto", "cuda", "cpu", "fp16", "bf16", "none", "nan", "-inf", "inf"),
    *("-1", "0", "1", "2", "3", "0.5", "1e-300", "1e300", "-0.0", "1000000000", "99999999999999999999", "1_000"),
    *("[]", "[0]", "[1,2]", "[a,b]", "{}", "{a:1}", "{a:{b:[1]}}", "[[]]", "a=b", "a,b", "'a,b'", "\\", "'", '"'),
    *("${env.repeats}", "${nothing}", "${oc.env:NOTHING}", "${now:%H}", "???", "/", "/nowhere/at/all", "../..", "."),
    *("os:system", "math:sqrt", "nosuch:thing", "gsm8k", "jsonl", "mixture", "dapo", "wandb", "[wandb]", "python"),
    *("\u00e9", "\ud7ff", "\U0001f600", "x" * 5000, "@", "#", "%d", "{", "}", "[", "]", ":", "a:b", "~", "!", "*"),
)
values = st.sampled_from(STRANGE_VALUES) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=12)
known_overrides = st.tuples(st.sampled_from(["", "", "", "", "+", "++"]), st.sampled_from(KEYS), values)
unknown_overrides = st.tuples(
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from(KEYS).map(lambda key: f"{key}.more")
    | st.sampled_from(KEYS).map(lambda key: key.replace("_", "-"))
    | st.from_regex(r"[a-z_]{1,8}(\.[a-z_0-9]{1,8}){0,2}", fullmatch=True),
    values,
)
overrides = st.lists(
    (known_overrides | unknown_overrides).map(lambda three: f"{three[0]}{three[1]}={three[2]}"), min_size=1, max_size=3
)


def test_overrides() -> None:
    check_cases(
        overrides.filter(lambda case: not any("\0" in override for override in case)),
        lambda case, folder: run_command(folder, *case),
    )


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("\ud800") | st.just("")
)
any_json = st.recursive(
    scalars, lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(st.text(), deeper, max_size=3), max_leaves=6
)
questions = st.sampled_from(["1+1=", "7+8=", "2+3="])
turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "", "me"]), "content": questions | scalars}
    ),
    max_size=3,
)
rows = st.one_of(
    st.fixed_dictionaries({"prompt": questions, "answer": any_json}),
    st.fixed_dictionaries({"prompt": any_json, "answer": st.sampled_from([2, "15", 5.0])}),
    st.fixed_dictionaries({"messages": turns, "answer": scalars}),
    st.fixed_dictionaries({"prompt": questions, "test_cases": any_json}),
    st.fixed_dictionaries({"prompt": questions, "gt_answer": scalars}, optional={"rubric": any_json}),
    any_json,
)
lines = rows.map(lambda row: json.dumps(row).encode())
corrupt_lines = st.binary(max_size=30) | st.sampled_from(
    [
        b"",
        b"\xef\xbb\xbf{}",
        b"[" * 50_000,
        b'{"prompt": "1+1=", "answer": ' + b"9" * 5000 + b"}",
        b"PAR1",
        b"\xff\xfe{\0}\0",
    ]
)
valid_lines = st.just(json.dumps({"prompt": "1+1=", "answer": 2}).encode())
files = st.lists(valid_lines | lines | corrupt_lines, min_size=1, max_size=6).map(b"\n".join)


def _with_data(case: tuple[bytes, str, str], folder: Path) -> CommandResult:
    content, suffix, reward = case
    path = folder / f"rows{suffix}"
    path.write_bytes(content)
    reward_override = [f"env.reward={reward}"] if reward else []
    return run_command(folder, "env.dataset=jsonl", "env.options={}", f"env.data_files={path}", *reward_override)


def test_data_files() -> None:
    check_cases(
        st.tuples(
            files,
            st.sampled_from([".jsonl", ".jsonl", ".json", ".parquet", ""]),
            st.sampled_from(["", "", "math", "exact"]),
        ),
        _with_data,
    )


REWARD = """
import builtins, os, pickle, sys, time
import numpy as np
from envs.task import Reward

VALUES = pickle.load(open(os.path.join(os.path.dirname(__file__), "values.pkl"), "rb"))

def make_value(value):
    match value:
        case ("raise", name): raise getattr(builtins, name)("on purpose")
        case ("exit", code): sys.exit(code)
        case ("os._exit", code): os._exit(code)
        case ("sleep", seconds): time.sleep(seconds)
        case ("numpy", kind, number): return getattr(np, kind)(number)
        case ("Reward", score, parts, outcome): return Reward(make_value(score), parts, outcome)
    return value

def score(completion, example):
    return make_value(VALUES[sum(completion.text.encode()) % len(VALUES)])
"""
numbers = (
    st.floats() | st.integers() | st.sampled_from([1e300, -1e300, 10**400, True, "1.0", None, b"1", [1.0], (1.0,), {}])
)
part_names = st.text(max_size=5) | st.sampled_from(["accuracy", "format", "a/b", "a.b", ""])
results = st.one_of(
    st.sampled_from([0.0, 1.0]),
    numbers,
    st.tuples(
        st.just("numpy"), st.sampled_from(["float32", "float64", "int64", "bool_"]), st.sampled_from([0, 1, 2, -3])
    ),
    st.tuples(
        st.just("Reward"),
        numbers,
        st.dictionaries(part_names, numbers, max_size=2) | st.sampled_from([None, [], "parts"]),
        st.sampled_from(["scored", "scored", "scored", "invalid", "error", "banana", None, 3]),
    ),
    st.tuples(
        st.just("raise"),
        st.sampled_from(
            ["ValueError", "MemoryError", "KeyboardInterrupt", "RecursionError", "SystemExit", "StopIteration"]
        ),
    ),
    st.tuples(st.just("exit"), st.sampled_from([0, 1])),
    st.tuples(st.just("os._exit"), st.sampled_from([0, 1])),
    st.tuples(st.just("sleep"), st.just(1)),
)


def _with_reward(case: tuple[list[Any], str, float], folder: Path) -> CommandResult:
    values, policy, max_error_rate = case
    (folder / "fuzzed_reward.py").write_text(REWARD)
    (folder / "values.pkl").write_bytes(pickle.dumps(values))
    return run_command(
        folder,
        "env.reward=fuzzed_reward:score",
        "env.reward_timeout_s=0.3",
        f"policy={policy}",
        f"env.max_error_rate={max_error_rate}",
    )


def test_rewards() -> None:
    check_cases(
        st.tuples(
            st.lists(results, min_size=1, max_size=4),
            st.sampled_from(["grpo", "grpo", "dapo", "rloo", "gspo"]),
            st.sampled_from([0.1, 0.5, 1.0]),
        ),
        _with_reward,
        EXAMPLES // SLOWER,
    )
