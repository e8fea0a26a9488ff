"""Every generator of reasoning-gym through the project's judge: the oracle's answer, senseless ones, and their time.

    python benchmarks/puzzles.py [--rows 10] [--only boxnet rush_hour]

`oracle`: rows whose right answer scores full marks: the library's own; where it has none, an example of its metadata
or what a solver here finds. `wrong`: texts that score full marks, of so many `asked`: those of `SENSELESS`, the right
answer "or" that of another row, and code that would leave a file behind if a scorer ran it. `p99`: the 99th percentile
of the seconds of a verdict, in brackets the slowest; the deadline is `env.reward_timeout_s=10`.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config.env import EnvConfig  # noqa: E402
from envs.task import Completion, Example, make_task  # noqa: E402

SENSELESS = (
    *(
        "wrong answer",
        "0",
        "-1",
        "[]",
        "{}",
        "None",
        "null",
        "()",
        "A",
        "x",
        "[[]]",
        "[0]",
        '""',
        "nan",
        "inf",
    ),
    *("a b c", "1e999", "9" * 5000, "(" * 2000, "None of the above", "True\nFalse", "yes and no"),
)
TRACE = Path(tempfile.gettempdir()) / f"a-scorer-ran-this-{time.time_ns()}"
CODE = f"__import__('pathlib').Path({str(TRACE)!r}).touch()"
COMPOSITE = [{"name": "chain_sum", "weight": 2}, {"name": "leg_counting", "weight": 1}]


def example_of(key: str) -> Callable[[dict[str, Any]], str]:
    def solve(metadata: dict[str, Any]) -> str:
        value = metadata[key]
        return value if isinstance(value, str) else json.dumps(value)

    return solve


def solve_boxnet(metadata: dict[str, Any]) -> str:
    """Each box goes to its target along the grid, one after the other."""
    state: dict[str, list[str]] = metadata["initial_state"]
    targets = {
        item[len("target_") :]: place for place, items in state.items() for item in items if "target_" in item
    }
    plan = []
    for place, items in state.items():
        for box in (item for item in items if item.startswith("box_")):
            colour = box[len("box_") :]
            (row, column), (to_row, to_column) = (
                tuple(map(float, at.split("_"))) for at in (place, targets[colour])
            )
            while (row, column) != (to_row, to_column):
                down = (to_row > row) - (to_row < row)
                right = 0 if down else (to_column > column) - (to_column < column)
                step = f"move({box}, square[{row + down}, {column + right}])"
                plan.append({f"Agent[{row}, {column}]": step})
                row, column = row + down, column + right
            plan.append({f"Agent[{row}, {column}]": f"move({box}, target_{colour})"})
    return json.dumps(plan)


def solve_integral(metadata: dict[str, Any]) -> str:
    """The library gives some integrals back as they are."""
    import sympy

    return str(sympy.integrate(sympy.sympify(metadata["integrand"]), sympy.Symbol(metadata["variable"])))


SIDE, EXIT_ROW = 6, 2
Cars = tuple[int, ...]


def solve_rush_hour(metadata: dict[str, Any]) -> str:
    """Breadth first over the places of all cars, one space at a time. The puzzle letters its cars anew."""
    board: str = metadata["board_config"]
    labels = sorted(set(board) - {"o", "x"})
    cells = {label: [place for place, mark in enumerate(board) if mark == label] for label in labels}
    strides = {label: cells[label][1] - cells[label][0] for label in labels}
    walls = {place for place, mark in enumerate(board) if mark == "x"}
    start: Cars = tuple(cells[label][0] for label in labels)
    came: dict[Cars, tuple[Cars, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        cars = waiting.popleft()
        if cars[0] == EXIT_ROW * SIDE + SIDE - len(cells["A"]):
            return " ".join(reversed(list(_moves_to(cars, came))))
        taken = walls | {
            first + strides[label] * step
            for label, first in zip(labels, cars, strict=True)
            for step in range(len(cells[label]))
        }
        for number, label in enumerate(labels):
            first, stride, size = cars[number], strides[label], len(cells[label])
            for sign, front in ((1, first + stride * size), (-1, first - stride)):
                on_board = 0 <= front < SIDE * SIDE and (stride == SIDE or front // SIDE == first // SIDE)
                after = (*cars[:number], first + sign * stride, *cars[number + 1 :])
                if on_board and front not in taken and after not in came:
                    came[after] = (cars, f"{chr(ord('A') + number)}{'+' if sign > 0 else '-'}1")
                    waiting.append(after)
    raise ValueError(f"{board} has no solution")


def _moves_to(cars: Cars, came: dict[Cars, tuple[Cars, str] | None]) -> Iterator[str]:
    while (step := came[cars]) is not None:
        cars, move = step
        yield move


SOLVERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "boxnet": solve_boxnet,
    "intermediate_integration": solve_integral,
    "graph_color": example_of("possible_answer"),
    "propositional_logic": example_of("example_answer"),
    "rubiks_cube": example_of("example_correct_answer"),
    "rush_hour": solve_rush_hour,
}
"""For generators of which some rows have no answer."""


def right_answer(entry: dict[str, Any]) -> str:
    if entry["answer"] is not None and "Integral(" not in str(entry["answer"]):
        return str(entry["answer"])
    return SOLVERS[entry["metadata"]["source_dataset"]](entry["metadata"])


def _is_the_answer(text: str, answer: Any) -> bool:
    try:
        return float(text) == float(answer)
    except (TypeError, ValueError):
        return text.strip() == str(answer).strip()


def judged(name: str, rows: int) -> tuple[int, list[str], int, list[float]]:
    """Rows that the oracle solves, senseless answers with full marks, how many were asked, seconds of each verdict."""
    options: dict[str, Any] = {"name": name, "num_rows": rows}
    if name == "composite":
        options["datasets"] = COMPOSITE
    task = make_task(EnvConfig(dataset="reasoning_gym", options=options))
    seconds: list[float] = []

    def score(text: str, example: Example) -> float:
        began = time.perf_counter()
        reward = task.reward(Completion(f"<think>so</think><answer>{text}</answer>"), example)
        seconds.append(time.perf_counter() - began)
        return reward.score

    examples = task.examples("train")
    answers = [right_answer(example.answer) for example in examples]
    right = sum(score(*pair) >= 1.0 for pair in zip(answers, examples, strict=True))
    asked, fooled = 0, []
    for example, answer in zip(examples, answers, strict=True):
        other = next((each for each in answers if each != answer), "17")
        for text in (*SENSELESS, f"{answer} or {other}", CODE):
            if _is_the_answer(text, example.answer["answer"]):
                continue
            asked += 1
            if score(text, example) >= 1.0 or TRACE.exists():
                fooled.append(text[:20])
                TRACE.unlink(missing_ok=True)
    return right, fooled, asked, seconds


def main() -> None:
    from reasoning_gym.factory import DATASETS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    names = [name for name in sorted(DATASETS) if not given.only or name in given.only]
    print("| generator | oracle | wrong | asked | p99 (slowest) |\n|---|---|---|---|---|")
    solved = total = wrong = 0
    slowest = 0.0
    for name in names:
        right, fooled, asked, seconds = judged(name, given.rows)
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        rows = given.rows
        solved, total, wrong, slowest = (
            solved + right,
            total + rows,
            wrong + len(fooled),
            max(slowest, *seconds),
        )
        said = f"{len(fooled)} ({', '.join(sorted(set(fooled)))})" if fooled else "0"
        line = f"| `{name}` | {right}/{rows} | {said} | {asked} | {1e3 * p99:.2f} ms ({1e3 * max(seconds):.2f} ms) |"
        print(line, flush=True)
    print(f"\n{len(names)} generators: oracle {solved} of {total}, {wrong} wrong, slowest {slowest:.2f} s")


if __name__ == "__main__":
    main()
