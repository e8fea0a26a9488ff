"""Blame without a process: who is at fault for a verification that crashed."""

from envs.example import CompletionInRun
from envs.judging.blame import EMPTY, Blame, Ticket, Verification
from envs.judging.outcome import Result, crashed
from envs.judging.pool import DIED, LostWorker
from envs.task import Completion, Example

RIGHT = Result(1.0, {"accuracy": 1.0}, "scored", 0.1)


def item(row: int = 0, text: str = "a") -> Verification:
    return Verification(Ticket([None], 1), 0, Completion(text), Example((), "gold", row))


def blame() -> Blame:
    return Blame(lambda example: -1.0)


def lost(reason: str) -> LostWorker:
    return LostWorker(0, 2.0, [0], reason)


def test_a_verdict_stands_and_a_crash_is_probed_with_an_empty_completion() -> None:
    ours, one = blame(), item()
    assert ours.of_result(one, RIGHT) is RIGHT
    assert one.judged_next.text == "a"
    assert ours.of_result(one, crashed(2.0, "MemoryError")) is None
    assert one.judged_next is EMPTY


def test_the_empty_completion_of_a_probe_knows_the_progress_of_the_run() -> None:
    ours = blame()
    one = Verification(
        Ticket([None], 1),
        0,
        CompletionInRun("a", 3, token_ids=(4,), step=5, total_steps=9),
        Example((), "gold", 0),
    )
    ours.of_result(one, crashed(2.0, "MemoryError"))
    assert one.judged_next == CompletionInRun("", step=5, total_steps=9)


def test_the_completion_is_to_blame_where_the_probe_is_judged() -> None:
    ours, one, other = blame(), item(), item(text="b")
    ours.of_result(one, crashed(2.0, "MemoryError"))
    assert ours.of_result(one, RIGHT) == Result(-1.0, {}, "invalid", 2.0)
    assert ours.of_result(other, crashed(3.0, "MemoryError")) == Result(-1.0, {}, "invalid", 3.0)


def test_the_example_is_to_blame_where_the_probe_fails_too_and_for_all_its_completions() -> None:
    ours, one, other, elsewhere = blame(), item(), item(text="b"), item(row=1)
    ours.of_result(one, crashed(2.0, "MemoryError"))
    fault = "MemoryError; so it is with an empty completion (it took long)"
    assert ours.of_result(one, crashed(9.0, "it took long")) == Result(-1.0, {}, "error", 2.0, fault)
    assert ours.of_result(other, crashed(3.0, "MemoryError")) == Result(-1.0, {}, "error", 3.0, fault)
    assert ours.of_result(elsewhere, crashed(3.0, "MemoryError")) is None


def test_a_worker_that_died_once_may_have_had_an_accident() -> None:
    ours, one = blame(), item()
    assert ours.of_lost_worker(one, lost(DIED), alone=True) is None
    assert one.judged_next.text == "a"
    assert ours.of_lost_worker(one, lost(DIED), alone=True) is None
    assert one.judged_next is EMPTY, "the second death is no accident"


def test_a_death_in_company_and_a_deadline_are_no_accidents_of_its_own() -> None:
    ours, together, late = blame(), item(), item(row=1)
    for _ in range(3):
        assert ours.of_lost_worker(together, lost(DIED), alone=False) is None
    assert together.judged_next.text == "a"
    assert ours.of_lost_worker(late, lost("it took longer than it may"), alone=False) is None
    assert late.judged_next is EMPTY


def test_suspects_are_judged_alone_until_the_last_of_them_is_judged() -> None:
    ours, one, other = blame(), item(), item(row=1)
    ours.workers_lost([one])
    assert not ours.one_at_a_time()
    ours.workers_lost([one, other])
    assert ours.one_at_a_time()
    ours.of_result(one, RIGHT)
    assert ours.of_result(other, crashed(1.0, "MemoryError")) is None
    assert ours.one_at_a_time(), "the probe is still to come"
    ours.of_result(other, RIGHT)
    assert not ours.one_at_a_time()
