"""What a test of a program costs: short tests a minute and core, in every form and language.

    python benchmarks/code_tests.py [--runs 300] [--level namespaces]

Each row is one kind of test on a program of one line, run one after the other by one sandbox, as a reward worker
does.
`by the clock` is the median of a whole run, start and comparison included; `tests a minute` what that makes on one
core, beside the 1,000 asked. `quickest` is what other work on the machine leaves alone.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from envs.sandbox.languages import LANGUAGES  # noqa: E402
from envs.sandbox.limits import Limits  # noqa: E402
from envs.sandbox.sandbox import LEVELS, Sandbox, why_not  # noqa: E402
from envs.verifiers.assertion_tests import Assertions  # noqa: E402
from envs.verifiers.code import CodeOptions, Tests, judge  # noqa: E402

ASKED = 1000
LINES = {"inputs": ["41\n"], "outputs": ["42\n"]}
CALLS = {"inputs": [[41]], "outputs": [42], "fn_name": "next_of"}
CHECK = {"entry_point": "next_of", "test": "def check(candidate):\n    assert candidate(41) == 42"}
LISTED = {"test_list": [f"assert next_of({number}) == {number + 1}" for number in range(3)]}
NEXT_OF = "def next_of(x): return x + 1"
KINDS: dict[str, tuple[str, str, object]] = {
    "input and output": ("python", "print(int(input()) + 1)", Tests.parse(LINES)),
    "a function": ("python", NEXT_OF, Tests.parse(CALLS)),
    "`check(candidate)`": ("python", NEXT_OF, Assertions.parse(CHECK)),
    "three asserts": ("python", NEXT_OF, Assertions.parse(LISTED)),
    "bash": ("bash", "read n; echo $((n + 1))", Tests.parse(LINES)),
    "javascript": (
        "javascript",
        "console.log(1 + +require('fs').readFileSync(0, 'utf8'))",
        Tests.parse(LINES),
    ),
}


def seconds_of(run: Callable[[], object], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--level", choices=LEVELS)
    given = parser.parse_args()
    levels = [given.level] if given.level else [level for level in LEVELS if why_not(level) is None]
    print("| level | a test by | by the clock | quickest | tests a minute | of the 1,000 asked |")
    print("|---|---|---|---|---|---|")
    for level in levels:
        for kind, (language, program, tests) in KINDS.items():
            interpreter = LANGUAGES[language].interpreter
            if interpreter and (level == "rlimits" or shutil.which(interpreter[0]) is None):
                continue
            with Sandbox(level, Limits(), language=language) as sandbox:

                def run(sandbox: Sandbox = sandbox, program: str = program, tests: object = tests) -> None:
                    verdict = judge(sandbox, program, tests, CodeOptions(), 10.0)
                    assert verdict.passed == verdict.total, verdict

                run()
                seconds = seconds_of(run, given.runs)
            median = statistics.median(seconds)
            rate = 60 / median
            print(
                f"| `{level}` | {kind} | {1e3 * median:.1f} ms | {1e3 * min(seconds):.1f} ms | {rate:,.0f} | "
                f"{rate / ASKED:.1f} x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
