"""Whole runs of the scripts, with the quickstart's model, which answers well enough to be taught."""

import math
import os
from collections.abc import Sequence

import torch

from config.checkpoints import checkpoint_path
from monitoring.metrics import without_clocks
from plan.machine import visible_gpus
from selftest.check import Bench
from selftest.tiny import TOKENIZER, train
from training.checkpoint import LEARNER
from training.tensor_files import saved_tensors

QUICKSTART = (f"model.name={TOKENIZER}", "env.num_envs=8", "env.repeats=8")


def schedule(
    bench: Bench,
    overrides: Sequence[str] = (),
    overlapped: bool = False,
    iterations: int = 2,
    reverse_gpus: bool = False,
) -> str:
    """Iterations of grpo.py or grpo_async.py: weights move, arrive, and every number is finite.

    reverse_gpus: the process sees the GPUs in the opposite order.
    """
    if reverse_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(reversed(visible_gpus()))
    rows = train(bench, *QUICKSTART, *overrides, overlapped=overlapped, iterations=iterations)
    for row in rows:
        strange = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not strange, f"not finite: {', '.join(strange)}"
        assert row["grad_norm"] > 0, "the gradient is zero"
    assert rows[-1]["policy_version"] > rows[0]["policy_version"], "no new version was pushed"
    check = max(row["weight_check/largest"] for row in rows if "weight_check/largest" in row)
    mismatch = rows[-1]["mismatch/p99"]
    return f"{len(rows)} steps, weight check {check:.1g}, mismatch p99 {mismatch:.1g}"


def resume(bench: Bench, overrides: Sequence[str] = ()) -> str:
    """A run that goes on from a checkpoint is the run that never stopped: to the bit on a CPU."""
    usual = (*QUICKSTART, "train.checkpoint_frequency=1", "train.keep_checkpoints=0", *overrides)
    whole = train(bench, *usual, iterations=4, name="whole")
    path = checkpoint_path(bench.folder / "whole", 2)
    again = train(bench, *usual, f"train.resume={path}", iterations=4, name="again")
    if bench.device == "cuda":
        assert [row["policy_version"] for row in again] == [row["policy_version"] for row in whole]
        return "goes on; kernels on GPUs promise no equal bits"
    assert [without_clocks(row) for row in again] == [without_clocks(row) for row in whole], (
        "metrics differ after the checkpoint"
    )
    last = [checkpoint_path(bench.folder / name, 4) / LEARNER for name in ("whole", "again")]
    ours, theirs = (saved_tensors(one) for one in last)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), (
        "the learner differs after the checkpoint"
    )
    return "equal bits"
