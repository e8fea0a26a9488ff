"""Tests the prices of a step's kernels: bytes of eager and of fused operations, MFU."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from config.schema.machine import MachineConfig
from tests.dry_run.test_step import plan_of
from tests.dry_run.test_tensor_tracker import TINY
from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.model_shape import GIB
from torchgrpo.run.dry_run.dry_run_report import format_dry_run
from torchgrpo.run.dry_run.fake_tensors import use_fake_tensors
from torchgrpo.run.dry_run.operation_prices import (
    BANDWIDTH_SHARE,
    LAUNCH_SECONDS,
    PRODUCT_SHARE,
    WIDE_PRODUCT_SHARE,
    Kernel,
    PriceTracker,
    fuse_layers,
)
from torchgrpo.run.dry_run.roofline import priced_step
from torchgrpo.run.dry_run.step import dry_run_step
from torchgrpo.training.fused_log_probs import add_product
from torchgrpo.training.logit_operations import logit_gradient, token_statistics

WIDTH = 256
MATRIX = WIDTH * WIDTH * 4
"""Bytes of a float32 matrix."""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"model.name={tmp_path}"


def test_the_price_of_a_kernel() -> None:
    rates = MachineConfig()
    assert Kernel(flops=10**12).seconds(rates) == 1 / (989 * PRODUCT_SHARE)
    assert Kernel(bytes=GIB).seconds(rates) == 1 / (3120 * BANDWIDTH_SHARE)
    assert Kernel(flops=1, bytes=1).seconds(rates) == LAUNCH_SECONDS


def test_an_eager_operation_is_a_kernel() -> None:
    tracker = PriceTracker({})
    with FakeTensorMode():
        matrix = torch.empty(WIDTH, WIDTH)
        with tracker:
            (matrix * 2).relu().t().detach()
    assert [kernel.bytes for kernel in tracker.kernels] == [2 * MATRIX, 2 * MATRIX]


def test_a_fused_kernel_writes_only_what_later_kernels_read() -> None:
    tracker = PriceTracker({})
    with FakeTensorMode():
        matrix, weight = torch.empty(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH)
        tracker.is_compiled = True
        with tracker:
            product = (matrix * 2 + matrix).relu() @ weight
            total = (product + matrix).sum()
    assert total.shape == ()
    fused, multiplied, summed = tracker.kernels
    assert (fused.bytes, multiplied.bytes, summed.bytes) == (2 * MATRIX, 3 * MATRIX, 2 * MATRIX + 4)
    assert (fused.flops, multiplied.flops, multiplied.share) == (0, 2 * WIDTH**3, WIDE_PRODUCT_SHARE)


def test_a_fused_kernel_writes_what_outlives_the_phase() -> None:
    tracker = PriceTracker({})
    with FakeTensorMode():
        matrix = torch.empty(WIDTH, WIDTH)
        tracker.is_compiled = True
        with tracker:
            kept = matrix * 2
            result = (kept + matrix).relu()
    assert kept.shape == result.shape
    assert [kernel.bytes for kernel in tracker.kernels] == [3 * MATRIX]


def test_a_fused_kernel_reads_a_storage_once() -> None:
    tracker, half = PriceTracker({}), WIDTH // 2
    with FakeTensorMode():
        matrix = torch.empty(WIDTH, WIDTH)
        tracker.is_compiled = True
        with tracker:
            result = (matrix[:, :half] + matrix[:, half:]) * matrix[:, :half]
    assert result.shape == (WIDTH, half)
    assert [kernel.bytes for kernel in tracker.kernels] == [MATRIX + MATRIX // 2]


def test_layers_are_fused_in_both_passes() -> None:
    def kernels(is_compiled: bool) -> list[Kernel]:
        tracker = PriceTracker({})
        with FakeTensorMode():
            layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3))
            states = torch.empty(WIDTH, WIDTH)
            with fuse_layers(tracker, layers if is_compiled else ()):
                with tracker:
                    for layer in layers:
                        states = layer(states)
                with tracker:
                    states.sum().backward()  # type: ignore[no-untyped-call]
        return tracker.kernels

    eager, compiled = kernels(False), kernels(True)
    assert sum(kernel.flops for kernel in eager) == sum(kernel.flops for kernel in compiled)
    products = [sum(kernel.flops > 0 for kernel in one) for one in (eager, compiled)]
    assert products[0] == products[1]
    assert len(compiled) < len(eager)
    assert sum(kernel.bytes for kernel in compiled) < sum(kernel.bytes for kernel in eager)


def test_operations_on_logits_are_kernels() -> None:
    """Statistics read the logits twice; their gradient is read once and written in another dtype."""
    tracker, rows = PriceTracker({}), WIDTH * 4
    with FakeTensorMode():
        logits, targets = torch.empty(WIDTH, WIDTH), torch.zeros(WIDTH, dtype=torch.int64)
        numbers, tokens = torch.ones(WIDTH), torch.zeros(WIDTH, dtype=torch.int64)
        with tracker:
            statistics = token_statistics(logits, targets, numbers)
            gradient = logit_gradient(logits, targets, *[numbers] * 5, tokens, torch.bfloat16)
    assert len(statistics) == 3 and gradient.dtype == torch.bfloat16
    assert [kernel.bytes for kernel in tracker.kernels] == [
        2 * MATRIX + 2 * rows + rows + 3 * rows,
        MATRIX + MATRIX // 2 + 2 * 2 * rows + rows,
    ]


def test_a_product_that_is_added_to_a_wider_sum() -> None:
    tracker = PriceTracker({})
    with use_fake_tensors(imitates_gpu=True):
        total, factor = torch.empty(WIDTH, WIDTH), torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
        with tracker:
            add_product(total, factor, factor)
    (kernel,) = tracker.kernels
    assert (kernel.flops, kernel.share) == (2 * WIDTH**3, PRODUCT_SHARE)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_priced_mfu(tiny: str, adapters: bool) -> None:
    """Attention computes its scores a second time, which is not useful work."""
    whole_blocks = "env.max_prompt_tokens=144"  # other lengths are padded to whole blocks, which is not useful either
    whole = ("train.gradient_checkpointing=false", f"train_model.lora.enabled={str(adapters).lower()}", whole_blocks)
    plan = plan_of(tiny, *whole, gpus=2)
    dry_run, shape = dry_run_step(plan), plan.shape
    assert shape is not None
    priced = priced_step(plan, shape, dry_run)
    scores = 2 * dry_run.sizes.pairs * shape.num_heads * shape.head_dim * shape.num_layers
    if not adapters:
        assert dry_run.flops == pytest.approx(priced.useful_flops + scores, rel=0.01)
    attention = 6 * scores
    products = shape.linear_parameters * dry_run.sizes.positions + shape.head_parameters * dry_run.sizes.targets
    assert priced.useful_flops == (4 if adapters else 6) * products + attention
    seconds = priced.microbatch + priced.optimizer / plan.learner.microbatches
    assert priced.mfu == pytest.approx(priced.useful_flops / seconds / 989e12)


def test_compiled_layers_have_fewer_kernels_and_equal_flops(tiny: str) -> None:
    plans = [plan_of(tiny, f"train.compile={value}", gpus=2) for value in ("false", "true")]
    eager, compiled = map(dry_run_step, plans)
    assert (eager.flops, eager.moved_bytes, eager.peaks) == (compiled.flops, compiled.moved_bytes, compiled.peaks)
    assert len(compiled.kernels) < len(eager.kernels)
    names = ("layers without fusion", "compiled layers")
    for plan, dry_run, layers in zip(plans, (eager, compiled), names, strict=True):
        assert plan.shape is not None
        output = format_dry_run(plan, plan.shape, dry_run)
        assert layers in output and "priced time, not measured:" in output and "priced MFU       " in output


MFU_GOAL = 0.45
QWEN_OVERRIDES = {
    "1.5B": (),
    "7B": (),
    "7B adapters": ("train_model.lora.enabled=true", "train_model.lora.r=16"),
}
"""Ways to train the sizes on one GPU of 141 GB; all else has its default."""


@pytest.mark.long
@pytest.mark.parametrize("size", QWEN_OVERRIDES)
def test_the_priced_mfu_of_an_h200(size: str) -> None:
    """Microbatches have sixteen thousand positions, and a GPU has the memory rate of an H200."""
    lengths = ("train.max_tokens_per_microbatch=16384", "inference_model.max_tokens=1024", "env.max_prompt_tokens=512")
    card = ("run=dry_run", "machine.gpu_bandwidth_gib_s=4470")
    model = (f"model.name=Qwen/Qwen2.5-{size.split()[0]}-Instruct", "policy.kl_coef=0")
    overrides = (*lengths, *card, *model, *QWEN_OVERRIDES[size])
    plan = make_plan(config_of("grpo_gsm8k", *overrides), False, machine(1, 139.8))
    assert plan.shape is not None
    priced = priced_step(plan, plan.shape, dry_run_step(plan))
    print(f"{size}: {priced}")
    assert priced.mfu >= MFU_GOAL
