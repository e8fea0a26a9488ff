"""Golds that are text though they look like arithmetic, and near misses."""

import pytest

from envs.verifiers.equivalence import same_answer
from envs.verifiers.math_verify_reward import strictly_same
from envs.verifiers.text_golds import MAX_CHARACTERS, is_text

KINDS: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "dates": [
        ("2024-05-17", ["2024-05-17", "\\text{2024-05-17}", "2024‐05‐17"], ["2002", "2024-05-18", "2024-17-05"]),
        ("2024-05", ["2024-05", "$2024-05$"], ["2019", "2024-06", "2024-5+0"]),
        ("05/17/2024", ["05/17/2024"], ["\\frac{5}{34408}", "05/18/2024"]),
        ("2024/05/17", ["2024/05/17"], ["\\frac{2024}{85}", "23.8"]),
        ("17.05.2024", ["17.05.2024", "17.05.2024."], ["17.05", "17.05.2023", "17.05.20240"]),
        ("May 17, 2024", ["May 17, 2024"], ["May 18, 2024", "2024"]),
        ("2024-05-17, 2024-05-18", ["2024-05-18, 2024-05-17", "2024-05-17 and 2024-05-18"], ["2002, 2001"]),
    ],
    "telephone numbers": [
        ("555-1234", ["555-1234", "The number is 555-1234."], ["-679", "1234-555", "555-1235"]),
        ("+1 555 123 4567", ["+1 555 123 4567"], ["15551234567", "+1 555 123 4568"]),
        ("(555) 123-4567", ["(555) 123-4567", "(555)123-4567"], ["555*123-4567", "63698"]),
        ("1-800-555-0199", ["1-800-555-0199"], ["-1553"]),
    ],
    "scores and ranges": [
        ("10-20", ["10-20", "10–20", "10--20", "10 - 20", "The range is 10-20."], ["-10", "20-10", "10-21", "10"]),
        ("3-2", ["3-2", "\\text{3-2}", "Score: 3-2"], ["1", "2-3", "-2+3"]),
        ("1-0", ["1-0"], ["1", "0-1"]),
        ("1/2-1/2", ["1/2-1/2", "½–½"], ["0", "1/2"]),
        ("$5-$10", ["$5-$10", "\\$5-\\$10", "5-10"], ["-5", "-\\$5", "10-5"]),
        ("\\$5-\\$10", ["\\$5-\\$10", "5-10"], ["-5", "€5-€10"]),
        ("5–10", ["5–10", "5-10", "5--10"], ["-5", "10–5"]),
        ("5 – 10", ["5–10", "5 - 10"], ["-5"]),
        ("5%-10%", ["5\\%-10\\%", "5-10"], ["-5", "-5%"]),
        ("10-20 years", ["10-20 years", "10-20", "10-20 \\text{ years}"], ["-10", "-10 years", "10-20 days"]),
        ("1,000-2,000", ["1000-2000", "1,000-2,000"], ["-1000"]),
        ("10-20, 30-40", ["30-40, 10-20", "10-20 and 30-40"], ["-10, -10", "10-20", "10-40, 20-30"]),
    ],
    "books, versions, addresses": [
        ("978-3-16-148410-0", ["978-3-16-148410-0", "\\boxed{978-3-16-148410-0}"], ["-147451", "978-3-16-148410-1"]),
        ("0-306-40615-X", ["0-306-40615-X"], ["-X-40921", "0-306-40615-x"]),
        ("080442957X", ["080442957X"], ["80442957X"]),
        ("1.2.3", ["1.2.3"], ["1.2.30", "1.23", "1,2,3", "1.3.2"]),
        ("v2.0.1", ["v2.0.1"], ["v2.0.10", "2.01v"]),
        ("v2.0", ["v2.0"], ["2v", "v2"]),
        ("192.168.0.1", ["192.168.0.1"], ["192.168.0.10", "192.168.01", "192.168"]),
    ],
    "formulas of chemistry": [
        ("H2O", ["H2O", "H_2O", "H_{2}O", "H₂O", "\\text{H}_2\\text{O}", "\\ce{H2O}"], ["2HO", "OH2"]),
        ("H_2O", ["H2O", "\\mathrm{H}_2\\mathrm{O}"], ["2HO", "HO_2", "H_2O_2"]),
        ("C6H12O6", ["C_6H_{12}O_6", "$\\mathrm{C_6H_{12}O_6}$"], ["432CHO", "C6H12O5"]),
        ("NaCl", ["NaCl", "\\text{NaCl}"], ["ClNa", "NaBr"]),
        ("CO2", ["CO_2", "\\text{CO}_2"], ["2CO", "Co2", "CO_3"]),
        ("Fe2O3", ["Fe_2O_3"], ["6FeO", "Fe3O2"]),
        ("Ca(OH)2", ["Ca(OH)_2", "\\mathrm{Ca(OH)_2}"], ["2CaOH", "Ca(OH)3"]),
        ("SO4^{2-}", ["SO_4^{2-}"], ["SO4", "SO4^{3-}"]),
        ("H2O, CO2 and NaCl", ["CO_2, NaCl, H_2O"], ["2HO, 2CO, NaCl", "H2O, CO2"]),
    ],
    "other marks": [
        ("4:30", ["4:30"], ["4.5", "4:03", "\\frac{4}{30}"]),
        ("12°N", ["12°N", "12^\\circ N"], ["12°S", "24N/2", "12"]),
        ("40.7°N, 74.0°W", ["40.7°N, 74.0°W", "40.7^\\circ N, 74.0^\\circ W"], ["40.7, -74.0"]),
        ("e4", ["e4"], ["4e", "e5"]),
        ("Nf3", ["Nf3"], ["3Nf", "Nf6"]),
        ("O-O", ["O-O"], ["0", "O-O-O", "x-x"]),
        ("2:3", ["2:3", "2 to 3"], ["3:2", "4:6"]),
        ("B12", ["B12", "B_{12}"], ["12B", "12"]),
        ("3x2", ["3x2"], ["6x", "2x3"]),
    ],
}  # fmt: skip
CASES = [(gold, right, wrong) for kind in KINDS.values() for gold, right, wrong in kind]


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES, ids=[gold for gold, _, _ in CASES])
def test_a_text_is_compared_as_written(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [given for given in right if not same_answer(given, gold)] == []
    assert [given for given in wrong if same_answer(given, gold)] == []


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        ("0.5", "1/2"),
        ("1", "$3-2$"),
        ("1", "3 - 2"),
        ("-5", "5−10"),
        ("3/2", "1 1/2"),
        ("3/5", "1.5/2.5"),
        ("-p+12", "12-p"),
        ("-8p+30", "30-8p"),
        ("-3i+6", "6-3i"),
        ("-x+1", "1-x"),
        ("B*2", "2B"),
        ("4.45\\times10^{15}", "4.45e15"),
        ("-2+x", "x-2"),
        ("V_1P_1", "P_1V_1"),
        ("V_2P_2", "P_2V_2"),
        ("\\ln 2", "\\ln{2}"),
        ("11", "8+3"),
        ("2\\sqrt2", "2\\sqrt{2}"),
        ("yes", "\\text{Yes}"),
    ],
)
def test_a_formula_stays_one(given: str, gold: str) -> None:
    assert not is_text(gold)
    assert same_answer(given, gold)


def test_a_long_text_is_none() -> None:
    assert is_text("1-" * 20 + "1")
    assert not is_text("1-" * MAX_CHARACTERS + "1")


@pytest.mark.parametrize(
    ("given", "gold", "right"), [("10-20", "10-20", True), ("-10", "10-20", False), ("2HO", "H2O", False)]
)
def test_the_library_is_not_asked_about_texts(given: str, gold: str, right: bool) -> None:
    assert strictly_same(given, gold) is right
