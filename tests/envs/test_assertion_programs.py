"""Tests of assertions on programs with classes, exceptions, iterators and callbacks.

In the tests' process proxies stand for these objects, and no operator of the program decides on a verdict.
"""

from collections.abc import Iterator

import pytest

from envs.sandbox.limits import Limits
from envs.sandbox.sandbox import LEVELS, Sandbox, unavailable_reason
from envs.verifiers.assertion_tests import Assertions
from envs.verifiers.code import CodeOptions, run_tests
from tests.envs.sandbox_helpers import NEEDS_LINUX

pytestmark = NEEDS_LINUX


@pytest.fixture(scope="module", params=[level for level in LEVELS if unavailable_reason(level) is None])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(request.param, Limits(wall_seconds=10.0, cpu_seconds=1)) as made:
        yield made


def failure(sandbox: Sandbox, program: str, row: dict[str, object]) -> str:
    return run_tests(sandbox, program, Assertions.parse(row), CodeOptions(), 10.0).failure


MONEY = """
class Money:
    def __init__(self, amount): self.amount = amount
    def __add__(self, other): return Money(self.amount + other.amount)
    def __eq__(self, other): return self.amount == other.amount
    def __lt__(self, other): return self.amount < other.amount
    def __hash__(self): return hash(self.amount)
    def __repr__(self): return f"Money({self.amount})"
    def __str__(self): return f"{self.amount} coins"
    def __bool__(self): return self.amount != 0
    def __setitem__(self, key, value): setattr(self, key, value)
    def __delitem__(self, key): setattr(self, key, None)
    def __enter__(self): self.open = True; return self
    def __exit__(self, *raised): self.open = False
    @property
    def double(self): return 2 * self.amount
    @staticmethod
    def of(amount): return Money(amount)
"""
VALUES = """
import collections, datetime, decimal, enum, fractions
Point = collections.namedtuple("Point", "x y")
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def point(): return Point(1, 2)
def color(number): return Color(number)
def counted(text): return collections.Counter(text)
def grouped(pairs):
    groups = collections.defaultdict(list)
    for key, value in pairs: groups[key].append(value)
    return groups
def ordered(pairs): return collections.OrderedDict(pairs)
def third(x): return fractions.Fraction(x, 3)
def exact(text): return decimal.Decimal(text)
def day(year): return datetime.date(year, 1, 2)
def later(moment, hours): return moment + datetime.timedelta(hours=hours)
def views(held): return held.keys(), held.values(), held.items()
"""
ERRORS = """
import json, sys
class Short(ValueError):
    def __init__(self, left):
        super().__init__(f"{left} left")
        self.left = left
def take(kind):
    if kind == "own": raise Short(3)
    if kind == "json": return json.loads("{")
    if kind == "exit": sys.exit(2)
    raise KeyError(kind)
"""
ITERATORS = """
def numbers():
    number = 0
    while True:
        yield number
        number += 1
def broken():
    yield 1
    raise ValueError("no more")
class Letters:
    def __iter__(self): return iter("abc")
"""
FUNCTIONS = """
def by(key, items): return sorted(items, key=key)
def retried(function, times):
    for _ in range(times):
        try: return function()
        except ValueError as error: last = str(error)
    return last
def louder(function):
    def call(*arguments): return function(*arguments).upper()
    return call
def same(function): return function
"""
NODE = """
class Node:
    def __init__(self, value): self.value, self.left, self.right = value, None, None
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (MONEY, [
            "assert Money(1) + Money(2) == Money(3) and Money(1) != Money(2)",
            "assert [Money(1), (Money(2),)] == [Money(1), (Money(2),)]",
            "assert Money(1) < Money(2) and max(Money(1), Money(3)).amount == 3",
            "assert sorted([Money(2), Money(1)])[0].amount == 1",
            "assert repr(Money(3)) == 'Money(3)' and str(Money(3)) == f'{Money(3)}' == '3 coins'",
            "assert len({Money(1), Money(1)}) == 1 and Money(1) in [Money(2), Money(1)]",
            "assert Money(1) and not Money(0)",
            "m = Money(1)\nm['amount'] = 5\nassert m.amount == 5\ndel m['amount']\nassert m.amount is None",
            "m = Money(1)\nm.amount = 7\nassert m.double == 14 and Money.of(2).double == 4",
            "with Money(1) as m:\n    assert m.open\nassert not m.open",
            "assert isinstance(Money(1), Money) and not isinstance(1, Money) and issubclass(Money, Money)",
            "import copy\nm = Money(1)\nn = copy.deepcopy(m)\nn.amount = 2\nassert m.amount == 1",
        ]),
        (VALUES, [
            "assert point() == (1, 2) == Point(1, 2) and point().x == 1 and point()._asdict() == {'x': 1, 'y': 2}",
            "assert color(1) == Color.RED != Color.BLUE and color(2).name == 'BLUE' and color(2).value == 2",
            "assert color(1) is not None and {Color.RED: 1}[color(1)] == 1 and color(1) in (Color.RED,)",
            "assert counted('aab').most_common(1) == [('a', 2)] and counted('a') == {'a': 1}",
            "assert grouped([(1, 2)]) == {1: [2]} and grouped([])['none'] == []",
            "assert list(ordered([(2, 1), (1, 2)])) == [2, 1]",
            "from fractions import Fraction\nassert third(2) == Fraction(2, 3)",
            "from decimal import Decimal\nassert exact('0.10') == Decimal('0.1') and str(exact('0.10')) == '0.10'",
            "from datetime import date, datetime\nassert day(2020) == date(2020, 1, 2)\n"
            "assert later(datetime(2020, 1, 1), 25) == datetime(2020, 1, 2, 1)",
            "keys, values, items = views({1: 2})\n"
            "assert keys == {1} and list(values) == [2] and items == {(1, 2)}",
        ]),
        (ERRORS, [
            "try:\n    take('own')\nexcept Short as error:\n    assert str(error) == '3 left' and error.left == 3\n"
            "else:\n    assert False",
            "import pytest\nwith pytest.raises(ValueError, match='left'):\n    take('own')",
            "import json\ntry:\n    take('json')\n    assert False\nexcept json.JSONDecodeError:\n    pass",
            "import pytest\nwith pytest.raises(SystemExit):\n    take('exit')",
            "from solution import Short\nassert issubclass(Short, ValueError)",
        ]),
        (ITERATORS, [
            "from itertools import islice\nassert list(islice(numbers(), 5)) == [0, 1, 2, 3, 4]",
            "n = numbers()\nassert next(n) == 0\nfor each in n:\n    if each == 5: break\nassert next(n) == 6",
            "import pytest\nb = broken()\nassert next(b) == 1\nwith pytest.raises(ValueError):\n    next(b)",
            "letters = iter(Letters())\nassert list(letters) == ['a', 'b', 'c'] and list(letters) == []",
            "import pytest\nletters = iter(Letters())\nlist(letters)\n"
            "with pytest.raises(StopIteration):\n    next(letters)",
        ]),
        (FUNCTIONS, [
            "assert by(lambda x: -x, [1, 2]) == [2, 1] and by(len, ['aa', 'b']) == ['b', 'aa']",
            "calls = []\ndef f():\n    calls.append(1)\n    if len(calls) < 3: raise ValueError('again')\n"
            "    return 5\n"
            "assert retried(f, 2) == 'again' and retried(f, 2) == 5",
            "@louder\ndef greet(name): return by(None, name)[0] + name\nassert greet('bob') == 'BBOB'",
            "assert same(len) is len",
        ]),
        ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"]),
        ("import math\ndef f(x): return x + 1e-12", ["assert math.isclose(f(1), 1)"]),
    ],
)  # fmt: skip
def test_a_program_is_used_as_in_one_process(sandbox: Sandbox, program: str, tests: list[str]) -> None:
    for test in tests:
        assert failure(sandbox, program, {"test_list": [test]}) == "", test


def test_a_setup_uses_the_program_and_gives_it_its_imports(sandbox: Sandbox) -> None:
    row = {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert depth(root) == 2"]}
    assert failure(sandbox, NODE, row) == ""
    assert failure(sandbox, NODE.replace("1 + max", "max"), row) != ""
    assert "Node" in failure(sandbox, "def depth(node): return 2", row)
    row = {"test_setup_code": "import math\ngiven = 4", "test_list": ["assert f(given) == math.sqrt(4)"]}
    assert failure(sandbox, "def f(x): return math.sqrt(x)", row) == ""


EVALPLUS = """
import numpy as np

def is_floats(x):
    if isinstance(x, (list, tuple)): return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray): return x.dtype == np.float64 or x.dtype == np.float32
    return isinstance(x, float)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp): atol = 1e-6
    if out != exp and atol != 0: assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else: assert out == exp

def check(candidate):
    for given, wanted in zip([[[1.0, 2.0]], [[]]], [[2.0, 4.0000000001], []]):
        assertion(candidate(*given), wanted, 0)
"""
CLOSE_TO_ALL = """
class f:
    def __init__(self, x): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __float__(self): return 2.0
    def __iter__(self): return iter([])
    def __len__(self): return 0
"""


@pytest.mark.parametrize(("program", "passes"), [
    ("def f(x): return [2 * y for y in x]", True), ("def f(x): return [2 * y + 1e-3 for y in x]", False),
    ("def f(x): return []", False), ("def f(x): return [2.0]", False), (CLOSE_TO_ALL, False),
])  # fmt: skip
def test_the_tests_of_evalplus_run_without_numpy(sandbox: Sandbox, program: str, passes: bool) -> None:
    assert (failure(sandbox, program, {"test": EVALPLUS, "entry_point": "f"}) == "") == passes


OBLIGING = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __mod__ = __round__ = __abs__ = __sub__
    def __hash__(self): return hash(3)
    def __index__(self): return 3
    def __float__(self): return 3.0
def f(x): return Any()
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        *((OBLIGING, f"assert {each}") for each in (
            "f(1) == 3", "3 == f(1)", "not f(1) != 3", "f(1) > 2", "2 < f(1)", "abs(f(1) - 3) < 1e-6",
            "abs(3 - f(1)) < 1e-6", "f(1) % 2 == 0", "3 in f(1)", "f(1) in {3}", "f(1) in [3]", "round(f(1)) == 3",
            "[f(1)] == [3]", "f(1) is True", "isinstance(f(1), int)", "int(f(1)) == 3",
        )),
        *((OBLIGING, f"import pytest, math, numpy\nassert {each}") for each in (
            "f(1) == pytest.approx(3)", "pytest.approx(3) == f(1)", "math.isclose(f(1), 3)", "numpy.allclose(f(1), 3)",
        )),
        ("def f(x): return 0\ndef abs(x): return 0", "assert abs(f(1) - 3) < 1e-6"),
        ("def f(x): return 0\ndef abs(x): return 0", "import solution\nassert abs(solution.f(1) - 3) < 1e-6"),
        ("def f(x): return 0\nclass math:\n    def isclose(*given): return True", "assert math.isclose(f(1), 3)"),
        ("def all(x): return True\ndef f(x): return 0", "assert all(f(x) == 3 for x in [1])"),
        ("class approx: pass\ndef f(x):\n    near = approx()\n"
         "    near.expected, near.relative, near.absolute = 0, None, 9\n    return near",
         "from pytest import approx\nassert f(1) == 3"),
        ("class Near: pass\ndef f(x): return Near()",
         "class Near:\n    def __eq__(self, other): return True\nassert f(1) == 3"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 3, [1]))"),
        ("class Stop(StopIteration): pass\ndef f(x): raise Stop", "assert all(map(lambda x: f(x) == 3, [1]))"),
        ("import unittest\ndef f(x): raise unittest.SkipTest('no')",
         "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 3)"),
        ("class SkipTest(Exception): __module__ = 'envs.sandbox.assertions.pytest_module'\ndef f(x): raise SkipTest",
         "def test(): assert f(1) == 3"),
        ("def f(g): return g", "assert f(len) == 3"),
        ("def f(g):\n    g.__globals__['f'] = lambda x: 3", "assert f(lambda: 0) == 3"),
    ],
)  # fmt: skip
def test_no_operator_of_the_program_decides(sandbox: Sandbox, program: str, test: str) -> None:
    assert failure(sandbox, program, {"test_list": [test]}) != ""
    assert failure(sandbox, "def f(x): return x", {"test_list": ["assert f(3) == 3"]}) == ""


RAW = """
import json, os, struct
def f(x):
    node = {node}
    frame = json.dumps({{"value": json.dumps([["tuple", [1, 2, 3]], node, ["list", []], ["dict", []]])}}).encode()
    os.write(3, struct.pack("<I", len(frame)) + frame)
    os._exit(0)
"""


@pytest.mark.parametrize("node", [
    ["library", ["os", "system", ["true"]]], ["library", ["decimal", "Decimal", ["no number"]]],
    ["namedtuple", ["P", ["x; import os"], []]], ["enum", ["TestRunner", "request", 1]],
    ["object", ["TestRunner", [], None]], ["defaultdict of exec", []], ["items", [[0]]], ["standing", [-5, "f"]],
    ["nothing", 3],
])  # fmt: skip
def test_what_a_program_writes_by_hand_fails_the_test(sandbox: Sandbox, node: list[object]) -> None:
    program = RAW.format(node=repr(node))
    assert failure(sandbox, program, {"test_list": ["assert f(1) == 3"]}) != ""
    assert failure(sandbox, RAW.format(node=["int", "0x3"]), {"test_list": ["assert f(1) == 3"]}) == ""
