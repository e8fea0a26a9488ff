"""A run that was killed and goes on is the run that never stopped, to the bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import grpo
from config.run_folder.checkpoints import checkpoint_path
from tests.recorded_runs import assert_same_run
from tests.saved import saved_model
from tests.scripts import ROOT, configured, rows
from tests.test_curriculum_runs import MIXED, ONE, SMALL
from tests.test_sampling import DYNAMIC
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep

SAMPLING = (*DYNAMIC, "env.oversample=6", "inference_model.temperature_end=0.8")
WAYS = {
    "a curriculum": ONE,
    "sources": MIXED,
    "both": (*ONE, *MIXED),
    "groups are replaced and it cools": (*SAMPLING, "env.num_envs=4"),
    "muon": ("optimizer=muon_adamw", "optimizer.muon_lr=2e-4"),
}
LONG = ("a curriculum", "sources", "muon")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way in LONG)) for way in WAYS])
def test_a_resumed_run_is_the_same_run(way: str, tmp_path: Path) -> None:
    given, whole, broken = (*SMALL, *WAYS[way]), tmp_path / "whole", tmp_path / "broken"
    run_job(configured(*given), whole, grpo.train, Lockstep)
    for killed_after in (2, 4):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, broken)
        for later in range(killed_after + 2, 7, 2):
            shutil.rmtree(checkpoint_path(broken, later))
        run_job(configured(*given, "train.resume=auto"), broken, grpo.train, Lockstep)
        assert_same_run(broken, whole, 6)
        summary = json.loads((broken / "summary.json").read_text())
        *_, last = [row for row in rows(broken) if "tokens/total" in row]
        assert summary["response_tokens"] == last["tokens/total"], "of the whole run"
        assert summary["wall_time_s"] >= last["time/elapsed_s"]
    weights = saved_model(checkpoint_path(whole, 6))
    for name, start in load_file(ROOT / "torchgrpo" / "models" / "quickstart" / "model.safetensors").items():
        assert not torch.equal(weights[name].float(), start.float()), f"{name} did not move"
