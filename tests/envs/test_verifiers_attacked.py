"""Near misses that were once taken for the gold, beside right answers."""

import pytest

from envs.verifiers.equivalence import same_answer
from envs.verifiers.math_verify_reward import strictly_same

KINDS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "primes": [
        ("y''", ["y''", "$y''$", "y^{\\prime\\prime}"], ["y'", "y", "y'''"]),
        ("f'", ["f'", "f^\\prime", "f^{\\prime}"], ["f", "f''''"]),
        ("A'", ["A'", "\\text{A'}"], ["A"]),
        ("2x'", ["2x'"], ["2x", "2x''"]),
        ("f'g+fg'", ["f'g+fg'", "f'g + fg'"], ["f'g+fg", "fg+fg'", "f'f+gg'"]),
        ("\\triangle A'B'C'", ["\\triangle A'B'C'"], ["\\triangle A'B'C", "\\triangle ABC"]),
        ("x'=3", ["x'=3", "3=x'", "3"], ["x=3", "x''=3"]),
        ("x'+y", ["x' + y"], ["x+y", "x+y'"]),
        ("\\frac{f'g-fg'}{g^2}", ["\\frac{f'g-fg'}{g^{2}}"], ["\\frac{fg'-f'g}{g^2}", "\\frac{fg-fg}{g^2}"]),
        ("(3, 4)'", ["(3,4)'"], ["(3,4)", "(4,3)'"]),
        ("5''", ["5''", '5"', "5", "5 inches"], ["5'", "6''"]),
        ("5'", ["5'", "5", "5 feet"], ["5''", '5"', "5 inches"]),
    ],
    "quotation marks": [
        ("7", ['"7"', "'7'.", '"7."', "``7''", "**'7'**", "“7”"], ['"8"']),
        ("Paris", ['"Paris"', "‘Paris’", "\\text{``Paris''}"], ['"Lyon"']),
        ('"Paris"', ["Paris", "'Paris'"], ["Lyon"]),
    ],
    "chemistry": [
        ("2CO", ["2CO"], ["CO2", "C2O", "CO_2"]),
        ("2NO", ["2NO"], ["NO2"]),
        (
            "2H2+O2=2H2O",
            ["2H_2 + O_2 = 2H_2O", "O2+2H2=2H2O", "2H_2+O_2 \\rightarrow 2H_2O", "\\ce{2H2 + O2 -> 2H2O}"],
            ["2H2O=2H2+O2", "4H+2O=4HO", "H2+O2=H2O", "2H2+O2"],
        ),
        ("(NH4)2SO4", ["(NH4)_2SO_4", "(NH_4)_2SO_4"], ["NH42SO4", "(NH4)SO4"]),
        ("(NH4)_2SO4", ["(NH4)2SO4"], ["NH42SO4"]),
        ("(NH_4)_2SO_4", ["(NH4)2SO4"], ["NH_{42}SO_4"]),
        ("Ca3(PO4)2", ["Ca_3(PO_4)_2"], ["Ca_3PO_{42}"]),
        ("Ca_3(PO_4)_2", ["Ca3(PO4)2", "\\mathrm{Ca_3(PO_4)_2}"], ["Ca_3PO_{42}", "Ca2(PO4)3"]),
        ("(1010)_2", ["1010_2", "1010_{2}", "(1010)_{(2)}"], ["1010_3", "1010"]),
        ("(A3F)_{16}", ["A3F_{16}"], ["A3E_{16}"]),
    ],
    "words between numbers": [
        ("5 ft 10 in", ["5 ft 10 in", "5ft 10in", "5 \\text{ ft } 10 \\text{ in}"], ["10 ft 5 in", "50 ft"]),
        ("2 lb 3 oz", ["2 lb 3 oz", "It is 2 lb 3 oz."], ["3 lb 2 oz"]),
        ("2 m 30 cm", ["2 m 30 cm"], ["30 m 2 cm"]),
        ("4 by 6", ["4 by 6"], ["3 by 8", "6 by 4"]),
        ("4 x 6", ["4 x 6"], ["3 x 8", "24x"]),
        ("2 by 5", ["2 by 5"], ["10 by 1"]),
        ("1 in 4", ["1 in 4"], ["4 in 1"]),
        ("2 of 3", ["2 of 3."], ["3 of 2"]),
        ("12th of 5th", ["12th of 5th"], ["5th of 12th"]),
        ("2 at 3", ["2 at 3"], ["3 at 2"]),
        ("3 cm", ["3 cm", "3"], ["3 mm"]),
        ("5 apples", ["5", "5 \\text{ apples}"], ["6 apples"]),
        ("2 to 3", ["2:3", "\\frac{2}{3}"], ["3 to 2"]),
    ],
    "codes": [
        ("3D", ["3D"], ["D3"]),
        ("2B", ["2B"], ["B2"]),
        ("12A", ["12A"], ["3A4", "A12"]),
        ("2PM", ["2PM", "2 PM", "2 p.m."], ["PM2"]),
        ("B-52", ["B-52", "B–52"], ["-52+B", "B-25"]),
        ("MH-370", ["MH-370"], ["-370+MH"]),
        ("A-1", ["-1+A"], ["A-2"]),
    ],
    "currencies": [
        ("$5", ["$5", "5", "\\$5", "5 dollars"], ["£5", "€5", "5 cents"]),
        ("\\$10", ["$10", "10 USD"], ["\\pounds 10", "¥10"]),
        ("£5", ["£5", "5", "\\pounds 5", "5 pounds"], ["5 dollars", "5 euros", "₹5"]),
        ("\\euro 5", ["€5", "5 euros", "5"], ["\\$5", "£5"]),
        ("5", ["£5", "€5", "$5", "$5$"], ["£6"]),
        ("$5$", ["£5", "\\$5"], ["$6"]),
    ],
    "products whose order counts": [
        ("A^{-1}B^{-1}", ["A^{-1} B^{-1}", "\\mathbf{A}^{-1}\\mathbf{B}^{-1}"], ["B^{-1}A^{-1}"]),
        ("AB^T", ["A B^{T}", "AB^T"], ["A^TB", "B^TA"]),
        ("\\mathbf{a}\\times\\mathbf{b}", ["\\mathbf{a} \\times \\mathbf{b}"], ["\\mathbf{b}\\times\\mathbf{a}"]),
        ("\\frac{P}{V}", ["PV^{-1}", "V^{-1}P"], ["VP^{-1}"]),
    ],
    "zeros in front": [
        ("0123456789", ["0123456789"], ["123456789", "123,456,789"]),
        ("0171234567", ["0171234567"], ["171,234,567"]),
        ("00501", ["00501", "\\text{00501}", "00501."], ["501", "0501"]),
        ("007", ["7", "07"], ["70"]),
        ("073", ["73"], ["730"]),
        ("73", ["073", "0073"], ["37"]),
    ],
    "room between digits": [
        ("12", ["\\hspace{1cm}12", "12\\text{ }", "\\text{}12"], ["1\\text{ }2", "1\\hspace{1cm}2", "1\\phantom{0}2"]),
        ("56", ["56\\hspace{1em}"], ["5\\text{ }6", "5\\mbox{ }6"]),
        ("2x", ["2\\hspace{1mm}x", "2\\text{ }x"], ["2\\hspace{1mm}y"]),
    ],
    "words behind a number": [
        ("5", ["5 units", "5 degrees"], ["5 tenths", "5 below zero", "5 hundredths", "5 negative"]),
        ("5 tenths", ["5 tenths"], ["5"]),
        ("5 below zero", ["5 below zero"], ["5"]),
    ],
}  # fmt: skip
CASES = [(gold, right, wrong) for kind in KINDS.values() for gold, right, wrong in kind]


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES, ids=[gold for gold, _, _ in CASES])
def test_a_near_miss_is_not_the_gold(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [given for given in right if not same_answer(given, gold)] == []
    assert [given for given in wrong if same_answer(given, gold) or strictly_same(given, gold)] == []


@pytest.mark.parametrize(
    ("given", "gold", "right"),
    [
        ("A, C", "AC", True),
        ("(A), (C)", "AC", True),
        ("(A, C)", "AC", False),
        ("C, A", "AC", True),
        ("A, B, C", "CAB", False),
        ("A, A", "AA", False),
    ],
)
def test_letters_are_several_choices_only_in_rising_order(given: str, gold: str, right: bool) -> None:
    assert same_answer(given, gold) is right


@pytest.mark.parametrize(
    ("given", "gold", "right"),
    [
        ("fg'+f'g", "f'g+fg'", True),
        ("gf+f'g", "f'g+fg'", False),
        ("3=x'", "x'=3", True),
        ("f'(x)=2x", "f(x)=2x", False),
        ("\\gcd(a',b)+1", "1+\\gcd(a,b)", False),
    ],
)
def test_the_library_tells_letters_with_primes_apart(given: str, gold: str, right: bool) -> None:
    assert strictly_same(given, gold) is right
