"""Tests that a killed and resumed run equals an uninterrupted one, to the bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import grpo
from config.run_folder.checkpoints import checkpoint_path
from tests.checkpoint_helpers import saved_model
from tests.recorded_runs import assert_same_run
from tests.script_runner import ROOT, compose_run_config, read_metrics
from tests.test_curriculum_runs import LEVELS, SMALL, SOURCES
from tests.test_sampling import DYNAMIC
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

SAMPLING = (*DYNAMIC, "env.oversample=6", "inference_model.temperature_end=0.8")
SETTINGS = {
    "a curriculum": LEVELS,
    "sources": SOURCES,
    "both": (*LEVELS, *SOURCES),
    "groups are replaced and it cools": (*SAMPLING, "env.num_envs=4"),
    "muon": ("optimizer=muon_adamw", "optimizer.muon_lr=2e-4"),
}
LONG_CASES = ("a curriculum", "sources", "muon")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (case in LONG_CASES)) for case in SETTINGS]
)
def test_a_resumed_run_is_the_same_run(case: str, tmp_path: Path) -> None:
    settings, uninterrupted, resumed = (*SMALL, *SETTINGS[case]), tmp_path / "whole", tmp_path / "broken"
    run_job(compose_run_config(*settings), uninterrupted, grpo.train, LockstepRun)
    for killed_after in (2, 4):
        shutil.rmtree(resumed, ignore_errors=True)
        shutil.copytree(uninterrupted, resumed)
        for later in range(killed_after + 2, 7, 2):
            shutil.rmtree(checkpoint_path(resumed, later))
        run_job(compose_run_config(*settings, "train.resume=auto"), resumed, grpo.train, LockstepRun)
        assert_same_run(resumed, uninterrupted, 6)
        summary = json.loads((resumed / "summary.json").read_text())
        *_, last = [row for row in read_metrics(resumed) if "tokens/total" in row]
        assert summary["response_tokens"] == last["tokens/total"], "of the whole run"
        assert summary["wall_time_s"] >= last["time/elapsed_s"]
    weights = saved_model(checkpoint_path(uninterrupted, 6))
    for name, start in load_file(ROOT / "torchgrpo" / "models" / "quickstart" / "model.safetensors").items():
        assert not torch.equal(weights[name].float(), start.float()), f"{name} did not move"
