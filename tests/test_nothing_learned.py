"""A run that trained on nothing ends non-zero and says why; one that learned something does not."""

import json
import time
from pathlib import Path

import pytest

import grpo
from config.schema.errors import RunError
from tests.scripts import configured, ran, rows
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep

SMALL = ("env.num_envs=4", "env.repeats=4", "train.checkpoint_frequency=0")
CUT = (*SMALL, "inference_model.max_tokens=1")


def test_it_says_so_after_five_steps_and_ends_with_2(tmp_path: Path) -> None:
    said = ran("grpo.py", tmp_path, *CUT, "train.total_dialog_turns=128").output
    why = (
        "All 4 groups had equal rewards (mean 0.00), 100% of the answers were cut at 1 tokens. What helps: raise "
        "inference_model.max_tokens; "
    )
    assert said.count(f"alarm: optimizer steps 1 to 5 taught nothing. {why}") == 1
    assert (
        f"error: nothing was learned: none of 8 optimizer steps had a gradient that came from rewards. {why}"
        in said
    )
    assert "Traceback" not in said
    log = (tmp_path / "grpo.log").read_text()
    assert "alarm: optimizer steps 1 to 5 taught nothing" in log and "failed: 8 optimizer steps" in log
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    assert len(rows(tmp_path)) == 8 and list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("env.reward=tests.rewards:never_right",), r"All 4 groups had equal rewards \(mean 0\.00\)"),
        (
            ("env.reward=tests.rewards:never_a_number", "env.max_error_rate=1.0"),
            "100% of the answers could not be judged",
        ),
        (
            ("policy=dapo", "policy.filter_attempts=1", "policy.filter_range=[0.98,0.99]"),
            "no answer was in the loss",
        ),
        (("policy.kl_coef=1.0", "env.reward=tests.rewards:never_right"), "equal rewards"),
    ],
)
def test_every_way_to_learn_nothing(more: tuple[str, ...], why: str, tmp_path: Path) -> None:
    config = configured(*SMALL, "train.total_dialog_turns=32", *more)
    with pytest.raises(RunError, match=f"(?i)nothing was learned: none of 2 optimizer steps.*{why}"):
        run_job(config, tmp_path, grpo.train, Lockstep)


def test_the_schedule_beside_generation_says_it_too(tmp_path: Path) -> None:
    ended = ran("grpo_async.py", tmp_path, *CUT, "train.total_dialog_turns=96")
    assert ended.returncode == 1
    assert "alarm: optimizer steps 1 to 5 taught nothing" in ended.output
    assert "error: nothing was learned: none of 6 optimizer steps" in ended.output


def test_an_interrupted_run_is_not_blamed(tmp_path: Path) -> None:
    def stopping(working: Lockstep) -> None:
        working.stop.requested = True
        grpo.train(working)

    config = configured(*CUT, "train.total_dialog_turns=64")
    assert run_job(config, tmp_path, stopping, Lockstep) == "interrupted"


def test_a_resumed_run_is_judged_by_all_of_its_steps(tmp_path: Path) -> None:
    """The first part learned; that the second gets nothing is fine."""
    first = configured(*SMALL, "train.total_dialog_turns=32")
    run_job(first, tmp_path, grpo.train, Lockstep)
    checkpoint = next(tmp_path.glob("checkpoints/*"))
    again = configured(*CUT, "train.total_dialog_turns=64", f"train.resume={checkpoint}")
    assert run_job(again, tmp_path, grpo.train, Lockstep) == "finished"
    assert [row["optimizer_step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert rows(tmp_path)[2]["reward/zero_variance_groups"] == 1.0


def test_elapsed_time_and_tokens_go_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    began = time.time()
    run_job(configured(*SMALL, "train.total_dialog_turns=32"), tmp_path, grpo.train, Lockstep)
    checkpoint = next(tmp_path.glob("checkpoints/*"))
    again = configured(*SMALL, "train.total_dialog_turns=48", f"train.resume={checkpoint}")
    run_job(again, tmp_path, grpo.train, Lockstep)
    found = rows(tmp_path)
    lengths = [16 * row["length/response_mean"] for row in found]
    assert [row["tokens/total"] for row in found] == [sum(lengths[: i + 1]) for i in range(3)]
    elapsed = [row["time/elapsed_s"] for row in found]
    assert elapsed == sorted(elapsed) and elapsed[2] > elapsed[1] > 0
    written = [row["time/unix_s"] for row in found]
    assert began <= written[0] <= written[1] <= written[2] <= time.time()
