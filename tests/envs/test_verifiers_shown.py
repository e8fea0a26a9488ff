"""Two answers whose units or sides of equations contradict each other, and what only shows an answer."""

import pytest

from envs.verifiers.equivalence import same_answer


@pytest.mark.parametrize(("given", "gold"), [
    (r"5\text{ cents}", r"\$5"), (r"\$5", r"5\text{ cents}"), (r"5\%", r"\$5"),
    (r"30\text{ radians}", r"30^\circ"), (r"30^{\circ}", r"30\text{ rad}"), ("30 cm", "30°"), ("12=11", "11"),
    ("5+6=12=11", "11"),
])  # fmt: skip
def test_what_contradicts_itself_or_the_golds_unit_is_wrong(given: str, gold: str) -> None:
    assert not same_answer(given, gold)


@pytest.mark.parametrize(("given", "gold"), [
    (r"5\text{ dollars}", r"\$5"), (r"\$5\text{ per hour}", r"\$5"), ("5 USD", r"\$5"),
    (r"30\text{ degrees}", r"30^\circ"), (r"50\%", "50 percent"), ("5", r"\$5"), ("75 cents", "75"),
    (r"\frac23=0.67", "0.67"), ("x=5+6=11", "11"),
])  # fmt: skip
def test_a_unit_that_one_of_them_has_or_both_say_does_not_count(given: str, gold: str) -> None:
    assert same_answer(given, gold)


@pytest.mark.parametrize("given", [
    r"14\,", r"14\;.", "14\\\\", r"14\enspace", r"\large 14", r"\color{red}14", r"{\color{red}{14}}",
    r"\textcolor[rgb]{1,0,0}{14}", r"\mathbf{\color{blue}{14}}", r"\underline{\underline{14}}",
    r"\colorbox{yellow}{$14$}", r"\hspace{1em}14\phantom{x}",
])  # fmt: skip
def test_what_only_shows_an_answer_does_not_count(given: str) -> None:
    assert same_answer(given, "14")
    assert not same_answer(given, "15")


@pytest.mark.parametrize(("given", "gold"), [
    (r"\frac{\color{red}{1}}{2}", r"\frac{1}{2}"), (r"x^{\textcolor{red}{12}}+1", "x^{12}+1"),
    (r"\{\textcolor{red}{2},1\}", r"\{1,2\}"), (r"\textcolor{red}{(1,2)}", "(1,2)"),
])  # fmt: skip
def test_colours_inside_formulas_do_not_count(given: str, gold: str) -> None:
    assert same_answer(given, gold)


def test_braces_of_sets_are_no_groups() -> None:
    assert not same_answer(r"\{\{1\}\}", r"\{1\}")
