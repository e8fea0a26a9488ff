"""Tests of `CrashAttribution` without processes: the completion or the example is at fault."""

from envs.example import CompletionInRun
from envs.reward_workers.crash_attribution import EMPTY_COMPLETION, CrashAttribution, RewardTicket, Verification
from envs.reward_workers.scoring import ScoringResult, crash_result
from envs.reward_workers.worker_pool import PROCESS_DIED, LostWorker
from envs.task import Completion, Example

RIGHT = ScoringResult(1.0, {"accuracy": 1.0}, "scored", 0.1)


def make_verification(row: int = 0, text: str = "a") -> Verification:
    return Verification(RewardTicket([None], 1), 0, Completion(text), Example((), "answer", row))


def make_attribution() -> CrashAttribution:
    return CrashAttribution(lambda example: -1.0)


def make_loss(reason: str) -> LostWorker:
    return LostWorker(0, 2.0, [0], reason)


def test_a_verdict_stands_and_a_crash_is_probed_with_an_empty_completion() -> None:
    attribution, verification = make_attribution(), make_verification()
    assert attribution.resolve_result(verification, RIGHT) is RIGHT
    assert verification.next_completion.text == "a"
    assert attribution.resolve_result(verification, crash_result(2.0, "MemoryError")) is None
    assert verification.next_completion is EMPTY_COMPLETION


def test_the_empty_completion_of_a_probe_has_the_progress_of_the_run() -> None:
    attribution = make_attribution()
    verification = Verification(
        RewardTicket([None], 1),
        0,
        CompletionInRun("a", 3, token_ids=(4,), step=5, total_steps=9),
        Example((), "answer", 0),
    )
    attribution.resolve_result(verification, crash_result(2.0, "MemoryError"))
    assert verification.next_completion == CompletionInRun("", step=5, total_steps=9)


def test_the_completion_is_at_fault_if_the_probe_is_scored() -> None:
    attribution, verification, other_verification = (
        make_attribution(),
        make_verification(),
        make_verification(text="b"),
    )
    attribution.resolve_result(verification, crash_result(2.0, "MemoryError"))
    assert attribution.resolve_result(verification, RIGHT) == ScoringResult(-1.0, {}, "invalid", 2.0)
    assert attribution.resolve_result(other_verification, crash_result(3.0, "MemoryError")) == ScoringResult(
        -1.0, {}, "invalid", 3.0
    )


def test_the_example_is_at_fault_for_all_its_completions_if_the_probe_fails_too() -> None:
    attribution, verification, other_verification, verification_of_other_row = (
        make_attribution(),
        make_verification(),
        make_verification(text="b"),
        make_verification(row=1),
    )
    attribution.resolve_result(verification, crash_result(2.0, "MemoryError"))
    fault = "MemoryError; an empty completion fails too (it took long)"
    assert attribution.resolve_result(verification, crash_result(9.0, "it took long")) == ScoringResult(
        -1.0, {}, "error", 2.0, fault
    )
    assert attribution.resolve_result(other_verification, crash_result(3.0, "MemoryError")) == ScoringResult(
        -1.0, {}, "error", 3.0, fault
    )
    assert attribution.resolve_result(verification_of_other_row, crash_result(3.0, "MemoryError")) is None


def test_a_worker_that_died_once_may_have_had_an_accident() -> None:
    attribution, verification = make_attribution(), make_verification()
    assert attribution.resolve_lost_worker(verification, make_loss(PROCESS_DIED), only_loss=True) is None
    assert verification.next_completion.text == "a"
    assert attribution.resolve_lost_worker(verification, make_loss(PROCESS_DIED), only_loss=True) is None
    assert verification.next_completion is EMPTY_COMPLETION, "the second death is no accident"


def test_a_death_with_others_and_a_deadline_do_not_count_as_accidents() -> None:
    attribution, shared_death, late_verification = (make_attribution(), make_verification(), make_verification(row=1))
    for _ in range(3):
        assert attribution.resolve_lost_worker(shared_death, make_loss(PROCESS_DIED), only_loss=False) is None
    assert shared_death.next_completion.text == "a"
    assert (
        attribution.resolve_lost_worker(late_verification, make_loss("it took longer than it may"), only_loss=False)
        is None
    )
    assert late_verification.next_completion is EMPTY_COMPLETION


def test_suspects_run_alone_until_the_last_of_them_is_resolved() -> None:
    attribution, verification, other_verification = (make_attribution(), make_verification(), make_verification(row=1))
    attribution.record_lost_workers([verification])
    assert not attribution.needs_single_worker()
    attribution.record_lost_workers([verification, other_verification])
    assert attribution.needs_single_worker()
    attribution.resolve_result(verification, RIGHT)
    assert attribution.resolve_result(other_verification, crash_result(1.0, "MemoryError")) is None
    assert attribution.needs_single_worker(), "the probe is still to come"
    attribution.resolve_result(other_verification, RIGHT)
    assert not attribution.needs_single_worker()
