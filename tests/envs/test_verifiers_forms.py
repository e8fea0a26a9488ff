"""Forms that right answers come in, and beside each kind the near misses that must stay wrong."""

import re
from pathlib import Path

import pytest

from config.env import EnvConfig
from envs.verifiers.equivalence import same_answer
from envs.verifiers.rules import RULES
from tests.envs.named_forms import NAMED

ENV = EnvConfig(dataset="math")
KINDS: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "several boxes": (
        [
            ("\\boxed{2} and \\boxed{3}", "\\{2,3\\}"), ("$\\boxed{3}$, $\\boxed{2}$", "2, 3"),
            ("$$\\boxed{(1,2)} \\quad \\text{and} \\quad \\boxed{(3,4)}$$", "(3,4),(1,2)"),
            ("\\boxed{2}, \\boxed{3}, and \\boxed{5}", "2,3,5"),
            ("$x=\\boxed{2}$ or $x=\\boxed{-2}$", "\\pm 2"),
            ("\\boxed{1} apple and \\boxed{2} pears", "1, 2"), ("\\boxed{x=1}, \\boxed{y=2}", "x=1,y=2"),
            ("it is \\boxed{7}, \\boxed{7}", "7"), ("first \\boxed{7}, then \\boxed{42}", "42"),
        ],
        [
            ("\\boxed{5} or \\boxed{6}", "6"), ("\\boxed{5}, \\boxed{6}", "6"),
            ("\\boxed{2} and \\boxed{3}", "\\{2,4\\}"), ("\\boxed{2} and \\boxed{3}", "(2,3)"),
            ("\\boxed{2}, \\boxed{3}", "2,3,5"), ("\\boxed{2} I think not, no \\boxed{3}", "2,3"),
            ("\\boxed{8} + \\boxed{3}", "11"),
        ],
    ),
    "separators": (
        [
            ("1;2", "1,2"), ("2 \\text{ and } 1", "1,2"), ("1 \\text{ or } 2", "2,1"),
            ("1,\\ 2,\\ 3", "3,2,1"), ("(1;2)", "(1,2)"), ("(1;2),(3;4)", "(3,4),(1,2)"),
            ("(1,2) or (2,1)", "(2,1),(1,2)"), ("x=1 \\quad y=2", "x=1,y=2"), ("x=1 \\\\ y=2", "x=1,y=2"),
            ("\\begin{cases}x=1\\\\y=2\\end{cases}", "x=1, y=2"),
            ("\\left\\{\\begin{array}{l}x=1\\\\y=2\\end{array}\\right.", "(x,y)=(1,2)"),
            ("1,2,\\text{ and }3", "1,2,3"), ("{1, 2}", "\\{2,1\\}"), ("\\lbrace 1,2 \\rbrace", "\\{2,1\\}"),
        ],
        [
            ("(2;1)", "(1,2)"), ("1;2", "1"), ("1 and 2", "(1,2)"), ("1,2 and 3", "1,2"),
            ("(1,2) or (2,2)", "(2,1),(1,2)"), ("1 \\quad 2", "12"), ("5 and 6", "56"),
            ("\\{1,2\\}", "(1,2)"),
        ],
    ),
    "names": (
        [
            ("(3,2)", "(p,q)=(3,2)"), ("p=3, q=2", "(p,q)=(3,2)"), ("q=2, p=3", "p=3,q=2"),
            ("(q,p)=(2,3)", "(p,q)=(3,2)"), ("3, 2", "p=3,q=2"), ("(3,2)", "p=3,q=2"), ("1", "|AB|=1"),
            ("AB=1", "1"), ("\\overline{AB}=1", "AB=1"), ("(5,2),(7,2)", "p=5,q=2;p=7,q=2"),
            ("x=1 or x=2", "1,2"), ("x=2,1", "x=1,x=2"), ("x_1=1, x_2=2", "1,2"),
            ("\\alpha=\\frac{\\pi}{4}", "\\frac{\\pi}{4}"), ("f(2)=5", "5"), ("P(A)=\\frac{1}{2}", "0.5"),
            ("\\angle ABC=60^\\circ", "60"), ("\\text{Area}=12", "12"), ("Area: 12", "12"),
            ("\\text{Total cost: } \\$12", "12"), ("m+n=11", "11"), ("xy=6", "6"), ("x=5+5+1=11", "x=11"),
            ("f(2)=2^2+1=5", "5"), ("(x,y)\\in\\{(1,2),(2,1)\\}", "(2,1),(1,2)"),
            ("f(x)=2x \\text{ for all } x", "f(x)=2x"),
        ],
        [
            ("(2,3)", "(p,q)=(3,2)"), ("(q,p)=(3,2)", "(p,q)=(3,2)"), ("2, 3", "p=3,q=2"),
            ("p=2, q=3", "p=3,q=2"), ("p=3", "p=3,q=2"), ("p=3, r=2", "p=3,q=2"), ("AC=1", "AB=1"),
            ("(2,5),(2,7)", "p=5,q=2;p=7,q=2"), ("x_1=2, x_2=1", "x_1=1,x_2=2"), ("f(3)=5", "f(2)=5"),
            ("1", "x+y=1"), ("1", "xy=1"), ("x+x=22", "22"), ("2x=22", "22"), ("x+3=11", "11"),
            ("m+n=8+3", "11"), ("Area: 8+3", "11"), ("y=2x", "f(x)=2x+1"), ("x=1, y=2", "x=1, x=2"),
        ],
    ),
    "sets of real numbers": (
        [
            ("1<x\\le 3", "(1,3]"), ("(1,3]", "1<x\\leq3"), ("3\\ge x>1", "(1,3]"), ("x>2", "(2,\\infty)"),
            ("2<x", "(2,+\\infty)"), ("x\\le 2", "(-\\infty,2]"),
            ("x<1 \\text{ or } x>3", "(-\\infty,1)\\cup(3,\\infty)"),
            ("(3,\\infty)\\cup(-\\infty,1)", "x<1 or x>3"), ("x \\in (1,3]", "1<x\\leq3"),
            ("\\{x|1<x\\leq 3\\}", "(1,3]"), ("\\left\\{x \\mid x>2\\right\\}", "x>2"),
            ("\\{x\\in\\mathbb{R}: x>2\\}", "(2,\\infty)"), ("x\\neq 3", "(-\\infty,3)\\cup(3,\\infty)"),
            ("\\mathbb{R}\\setminus\\{3\\}", "x\\ne3"), ("(-\\infty,\\infty)", "\\mathbb{R}"),
            ("\\text{all real numbers}", "(-\\infty,\\infty)"), ("0<f(x)<1", "(0,1)"), ("x>=5", "x\\geq5"),
            ("-x>-1", "x<1"), ("2x+4y<6", "x+2y<3"), ("-2 ≤ x ≤ 7", "[-2,7]"),
        ],
        [
            ("1\\le x\\le 3", "(1,3]"), ("1<x<3", "(1,3]"), ("x\\ge 2", "(2,\\infty)"),
            ("x<2", "(2,\\infty)"), ("y>2", "x>2"), ("x>1+1", "(2,\\infty)"),
            ("x<1", "(-\\infty,1)\\cup(3,\\infty)"),
            ("x<1 \\text{ or } x\\ge3", "(-\\infty,1)\\cup(3,\\infty)"),
            ("x<1 \\text{ and } x>3", "(-\\infty,1)\\cup(3,\\infty)"), ("\\{x|1<x<3\\}", "(1,3]"),
            ("\\{1,3\\}", "1<x<3"), ("x\\neq 3", "\\mathbb{R}"), ("\\mathbb{R}\\setminus\\{2\\}", "x\\ne3"),
            ("2x<2", "x<1"), ("-x<-1", "x<1"), ("2x+4y>6", "x+2y<3"), ("(3,1)", "1<x<3"),
        ],
    ),
    "numbers": (
        [
            ("3.2e5", "320000"), ("3.2\\times 10^{5}", "3.2e5"), ("3.2e-7", "3.2 \\cdot 10^{-7}"),
            ("3.2*10^5", "320000"), ("1\u2009234\u2009567", "1234567"), ("12\u202f000", "12000"),
            ("12\xa0000", "12000"), ("12\\ 000", "12000"), ("12~000", "12000"),
            ("12\\,000\\,000", "12,000,000"), ("12{,}000", "12000"), ("0.\\overline{3}", "\\frac{1}{3}"),
            ("0.1\\overline{6}", "\\frac16"), ("0.\\dot{1}4285\\dot{7}", "1/7"),
            ("\\frac{1}{3}", "0.\\overline{3}"), ("-2\\frac{1}{2}", "-2.5"), ("2½", "\\frac{5}{2}"),
            ("€5", "5"), ("\\$5.00", "5"), ("\\text{\\$}5", "5"), ("28 \\text{ percent}", "28\\%"),
            ("60°", "60^\\circ"), ("\\pm 3", "3,-3"), ("\\pm1, \\pm2", "1,-1,2,-2"),
            ("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}"), ("\\sqrt[3]{x}^2", "x^{2/3}"),
            ("\\arcsin x", "\\sin^{-1} x"), ("\\lg x", "\\log_{10} x"), ("120", "\\binom{10}{3}"),
            ("\\dbinom{n}{k}", "{n \\choose k}"), ("120", "5!"), ("(1010)_2", "1010_2"),
            ("1010_{(2)}", "1010_{2}"), ("\\sum_{k=1}^{n} k a_k", "\\sum_{k=1}^{n} a_k k"),
        ],
        [
            ("3.2e5", "32000"), ("3.2e4", "3.2\\times10^5"), ("32e4", "320000"), ("1.1e1", "11"),
            ("1 234", "1234"), ("12\xa034", "1234"), ("1\u2009000\xa0000", "1000"), ("0.3", "\\frac13"),
            ("0.\\overline{3}", "0.3"), ("0.\\overline{30}", "\\frac13"), ("€5", "\\$5"), ("１１", "11"),
            ("\\pm 3", "3"), ("\\pm1, 2", "1,-1,2,-2"), ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
            ("\\sqrt{4+2\\sqrt2}", "1+\\sqrt2"), ("\\binom{10}{3}", "120"), ("5!", "120"),
            ("1010_3", "1010_2"), ("1010", "1010_2"), ("\\sum_{k=1}^{n} k a_k", "\\sum_{k=0}^{n} a_k k"),
            ("\\sum_{k=1}^{n} k", "\\sum_{k=1}^{n} 2k"),
        ],
    ),
    "characters": (
        [
            ("\u200b7\ufeff", "7"), ("\u200e1\u00ad2", "12"), ("−5", "-5"), ("x² + 1", "x^2+1"),
            ("10⁻³", "10^{-3}"), ("a₁", "a_1"), ("（1，2）", "(1,2)"), ("2×3", "2\\times3"),
            ("∅", "\\varnothing"), ("√2", "\\sqrt{2}"), ("3π/4", "\\frac{3\\pi}{4}"), ("x∈[0，1)", "[0,1)"),
            ("1或2", "1,2"), ("α+β", "\\alpha+\\beta"),
        ],
        [
            ("1\u200b2", "1"), ("x³", "x^2"), ("x₂", "x^2"), ("（2，1）", "(1,2)"), ("√3", "\\sqrt{2}"),
            ("٧", "7"), ("8＋3", "11"),
        ],
    ),
    "words around": (
        [
            ("The answer is 5", "5"), ("\\text{The answer is } 5", "5"), ("5 \\text{ apples}", "5"),
            ("5 cm", "5 centimeters"), ("5\\text{ cm}^2", "5 \\text{ square centimeters}"),
            ("5 feet", "5 ft"), ("9.8 m/s", "9.8 \\text{ meters per second}"), ("5\\mathrm{~J}", "5"),
            ("5\\,\\text{N}", "5"), ("\\text{(B)}", "B"), ("\\textbf{(B)}\\ 12", "B"),
            ("B) 12", "\\text{(B)}"), ("B.", "B"), ("(b)", "B"), ("option B.", "(B)"), ("A, C and D", "ACD"),
            ("YES", "\\text{Yes}"), ("\\text{False}", "false"), ("\\emptyset", "\\varnothing"),
            ("\\{\\}", "\\varnothing"), ("\\text{no real solutions}", "\\emptyset"), ("2 : 3", "2:3"),
            ("2 \\text{ to } 3", "2:3"), ("\\frac{2}{3}", "2:3"), ("4:30 \\text{ p.m.}", "4:30 PM"),
            ("x=k\\pi, k\\in\\mathbb{Z}", "x=k\\pi\\ (k \\in Z)"),
        ],
        [
            ("The answer is 8+3", "11"), ("\\text{The answer is } 8+3", "11"), ("5 cm", "5 meters"),
            ("5 cm", "5 \\text{ cm}^2"), ("5\\mathrm{~J}", "5\\mathrm{~N}"), ("5J", "5"),
            ("2\\mathrm{e}", "2"), ("5\\mathrm{i}", "5"), ("(A)", "B"), ("(B) or (C)", "B"),
            ("(B), (C)", "B"), ("A) not (B)", "B"), ("B+1", "B"), ("(A)+1", "A"), ("A, C", "ACD"),
            ("AB", "BA"), ("no", "yes"), ("\\{0\\}", "\\varnothing"), ("0", "\\varnothing"), ("3:2", "2:3"),
            ("4:6", "2:3"), ("4/6", "2:3"), ("4:30 a.m.", "4:30 PM"), ("4:30", "4:03"), ("1/2", "4:30"),
            ("no solution", "0"),
        ],
    ),
    "equations": (
        [
            ("2x-y+1=0", "y=2x+1"), ("y-1=2x", "y=2x+1"), ("x+y=1", "2x+2y=2"),
            ("x-y=1, 2x+3y=6", "2x+3y=6, x-y=1"),
            ("\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
            ("\\begin{pmatrix}\\frac{1}{2}\\\\1\\\\\\end{pmatrix}", "\\begin{bmatrix}0.5\\\\1\\end{bmatrix}"),
            ("\\langle 1,2\\rangle", "(1,2)"), ("\\\\frac{1}{2}", "\\frac12"),
            ("\\frac{1}{2}", "\\\\left( \\\\frac{1}{2} \\\\right)"),
        ],
        [
            ("2x-y-1=0", "y=2x+1"), ("2x=10", "x=5"), ("-2x=-10", "x=5"), ("x+y=1", "x+y=2"),
            ("x-y=1, 2x+3y=6", "2x+3y=6, x-y=2"),
            ("\\left[\\begin{array}{cc}1&3\\\\2&4\\end{array}\\right]", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
            ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
            ("\\langle 2,1\\rangle", "(1,2)"),
        ],
    ),
    **NAMED,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_in_every_form(kind: str) -> None:
    assert [pair for pair in KINDS[kind][0] if not same_answer(*pair)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_near_misses_stay_wrong(kind: str) -> None:
    assert [pair for pair in KINDS[kind][1] if same_answer(*pair)] == []


LONG = "so far \\boxed{200} and more " * 3


@pytest.mark.parametrize(("text", "gold", "right"), [
    (LONG + "Final Answer: The final answer is $10,455$. I hope it is correct.", "10455", True),
    (LONG + "The final answer is 7. I hope it is correct.", "200", False),
    ("The final answer is 7. I hope it is correct. No: \\boxed{8}", "8", True),
    ("The final answer is 7. I hope it is correct. No: \\boxed{8}", "7", False),
    ("The final answer is 8+3. I hope it is correct.", "11", False),
    ("Answer\n\\[\n 9 \n\\]", "9", True),
    ("Answer: \n$$ 9 $$", "9", True),
    ("it is $8$, so $$\n9\n$$", "8", False),
    ("the roots are $\\boxed{2}$ and $\\boxed{3}$.", "2,3", True),
    ("<think>\\boxed{2}</think> \\boxed{3}", "2,3", False),
    ("<think>x</think><answer>\\boxed{2}, \\boxed{3}</answer>", "\\{3,2\\}", True),
    ("\\boxed{2}, " * 70 + "\\boxed{2}", "2", True),
    ("\\boxed{2}, " * 70 + "\\boxed{3}", "3", False),
])  # fmt: skip
def test_the_final_answer_is_found_where_it_stands(text: str, gold: str, right: bool) -> None:
    assert bool(RULES["math"].judge(text, gold, ENV)["accuracy"]) is right


def test_the_table_of_the_docs_says_what_is_judged() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    table = text.partition("| gold | is also | is not |")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`([^`]*)`", cell) for cell in line.split(" | ")] for line in table.splitlines()[2:]]
    assert len(rows) == 15
    for golds, also, near in rows:
        for gold in golds:
            assert [given for given in also if not same_answer(given, gold)] == [], gold
            assert [given for given in near if same_answer(given, gold)] == [], gold
