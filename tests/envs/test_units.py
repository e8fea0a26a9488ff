"""When the units of two answers, or the sides of a chain of equations, contradict each other."""

import pytest

from envs.verifiers.equivalence import same_answer


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        (r"5\text{ cents}", r"\$5"),
        (r"\$5", r"5\text{ cents}"),
        (r"5\%", r"\$5"),
        (r"30\text{ radians}", r"30^\circ"),
        (r"30^{\circ}", r"30\text{ rad}"),
        ("30 cm", "30°"),
        ("12=11", "11"),
        ("5+6=12=11", "11"),
    ],
)
def test_what_contradicts_itself_or_the_golds_unit_is_wrong(given: str, gold: str) -> None:
    assert not same_answer(given, gold)


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        (r"5\text{ dollars}", r"\$5"),
        (r"\$5\text{ per hour}", r"\$5"),
        ("5 USD", r"\$5"),
        (r"30\text{ degrees}", r"30^\circ"),
        (r"50\%", "50 percent"),
        ("5", r"\$5"),
        ("75 cents", "75"),
        (r"\frac23=0.67", "0.67"),
        ("x=5+6=11", "11"),
    ],
)
def test_a_unit_that_one_of_them_has_or_both_say_does_not_count(given: str, gold: str) -> None:
    assert same_answer(given, gold)
