"""Checks the sizes, FLOPs and metrics of `StepSpeed` against counts by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.schema.policy import PolicyConfig
from tests.gpu_layouts.layouts import LAYOUTS, Case, config_of, plan_of, save_tiny
from tests.groups import credit_groups, sample_tiny_groups
from tests.training.tiny_learners import REPEATS, make_learner, sampled_batch
from torchgrpo.batches.batch import Tokens
from torchgrpo.plan.model_shape import GIB, ModelShape
from torchgrpo.training.microbatches import Microbatch, idle_microbatch
from torchgrpo.training.packed_sequence import pack_rows
from torchgrpo.training.step_speed import PackedSizes, StepSpeed, packed_sizes, useful_flops

SHAPE = ModelShape(
    vocab_size=11,
    hidden_size=4,
    intermediate_size=6,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    tied=True,
    max_positions=64,
)
GPUS = StepSpeed(SHAPE, gpus=2, gpu_flops=1e6, has_adapters=False, has_own_processes=True)


def test_sizes_of_rows_by_hand() -> None:
    """Two rows share a prompt of two tokens; last response tokens are no inputs."""
    prompt = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    tokens = Tokens(
        prompt=prompt,
        prompt_mask=prompt > 0,
        response=torch.ones(3, 3, dtype=torch.int64),
        response_mask=mask,
        loss_mask=mask,
        batch_size=[3],
    )
    pairs = (3 + 6) + (2 * 2 + 3) + (3 + 1)  # prompts; first and third response with their prompts
    assert packed_sizes(tokens) == PackedSizes(positions=2 + 3 + 2 + 1, targets=6, pairs=pairs)


def test_sizes_equal_those_of_the_packed_sequence() -> None:
    tokens = sampled_batch().tokens
    segments, sizes = pack_rows(tokens).segments, packed_sizes(tokens)
    visible = segments.block_mask(torch.device("cpu")).mask_mod
    positions, zero = torch.arange(segments.total), torch.zeros((), dtype=torch.int64)
    assert sizes.positions == segments.total
    assert sizes.pairs == int(visible(zero, zero, positions[:, None], positions).sum())
    assert sizes.targets == int(tokens.loss_mask.sum())


def test_flops_by_hand() -> None:
    sizes = PackedSizes(positions=5, targets=3, pairs=7)
    # Per layer: queries and output 2 x 4 x 4, keys and values 2 x 4 x 2, MLP 3 x 4 x 6.
    products, attention = 3 * (32 + 16 + 72) * 5 + 11 * 4 * 3, 7 * 2 * 2 * 3
    assert useful_flops(SHAPE, sizes) == 6 * products + 12 * attention
    assert useful_flops(SHAPE, sizes, has_adapters=True) == 4 * products + 12 * attention
    assert useful_flops(SHAPE, sizes, has_gradient=False) == 2 * products + 4 * attention


def test_microbatches_without_a_gradient_count_less_and_idle_ones_nothing() -> None:
    batch = sampled_batch()
    rows, sizes = torch.arange(len(batch)), packed_sizes(batch.tokens)
    trained, idle = Microbatch(rows, batch), idle_microbatch(batch)
    scored = replace(trained, has_gradient=False)
    metrics = GPUS.metrics(batch.tokens, [[trained, scored], [idle, idle]], 0.5, GIB)
    flops = useful_flops(SHAPE, sizes) + useful_flops(SHAPE, sizes, has_gradient=False)
    assert metrics["throughput/learner_mfu"] == pytest.approx(flops / (0.5 * 2 * 1e6))
    assert metrics["memory/learner_peak_gib"] == 1


@pytest.mark.parametrize(
    ("step_speed", "absent"),
    [
        (replace(GPUS, gpus=0), {"throughput/learner_mfu", "memory/learner_peak_gib"}),
        (replace(GPUS, shape=None), {"throughput/learner_mfu"}),
        (replace(GPUS, has_own_processes=False), {"memory/learner_peak_gib"}),
    ],
    ids=["CPU", "unknown shape", "engine in the process"],
)
def test_metrics_without_a_meaning_are_absent(step_speed: StepSpeed, absent: set[str]) -> None:
    batch = sampled_batch()
    shares = [[Microbatch(torch.arange(len(batch)), batch)]]
    all_metrics = GPUS.metrics(batch.tokens, shares, 2.0, GIB)
    assert set(all_metrics) - set(step_speed.metrics(batch.tokens, shares, 2.0, GIB)) == absent


@pytest.mark.parametrize(
    ("layout", "has_own_processes"), [("1 GPU, in turns", False), ("2 GPUs", True), ("8 GPUs, 3 engines", True)]
)
def test_a_plan_decides_what_is_reported(layout: str, has_own_processes: bool, tmp_path: Path) -> None:
    config = config_of(LAYOUTS[layout], Case(PolicyConfig(), save_tiny(tmp_path / "model", tied=False)))
    plan = plan_of(LAYOUTS[layout], config)
    step_speed = StepSpeed.from_plan(config, plan)
    assert step_speed.gpus == plan.devices.ranks and step_speed.shape == plan.shape
    assert step_speed.has_own_processes == has_own_processes
    assert step_speed.gpu_flops == pytest.approx(989e12)


def test_servers_outside_the_run_share_no_memory(tmp_path: Path) -> None:
    config = config_of(LAYOUTS["1 GPU, in turns"], Case(PolicyConfig(), save_tiny(tmp_path / "model", tied=False)))
    config.inference_model.urls, config.inference_model.backend = ["http://127.0.0.1:1"], "http"
    plan = plan_of(LAYOUTS["1 GPU, in turns"], config)
    assert plan.devices.in_process and StepSpeed.from_plan(config, plan).has_own_processes


def test_a_step_reports_its_speed(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    learner.step_speed = replace(GPUS, gpus=1)
    report = learner.step(credit_groups(learner, sample_tiny_groups(num_groups=2, repeats=REPEATS)))
    assert (
        report.speed_metrics["throughput/learner_tokens_per_s"] > 0
        and report.speed_metrics["throughput/learner_mfu"] > 0
    )
    assert report.speed_metrics["memory/learner_peak_gib"] == 0, "a CPU"
