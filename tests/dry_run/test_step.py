"""Tests the dry run of one rank's step: traffic, FLOPs, peaks, output, exit code."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

from config.schema.errors import ConfigError
from grpo import train
from tests.dry_run.test_tensor_tracker import TINY
from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import reference_bytes
from torchgrpo.plan.microbatch_sizes import padded_positions
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan
from torchgrpo.run.dry_run.dry_run_report import format_dry_run, oversized_phases
from torchgrpo.run.dry_run.roofline import collective_bytes, priced_step, step_seconds
from torchgrpo.run.dry_run.step import dry_run_peaks, dry_run_step, peak_phase
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun

PROMPT, RESPONSE = 40, 24


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"model.name={tmp_path}"


def plan_of(*overrides: str, gpus: int = 9) -> Plan:
    lengths = (f"env.max_prompt_tokens={PROMPT}", f"inference_model.max_tokens={RESPONSE}")
    return make_plan(config_of("grpo_gsm8k", *lengths, *overrides), False, machine(gpus, 80.0))


@pytest.mark.parametrize("shards", [8, 4])
def test_collective_bytes_equal_the_theory(tiny: str, shards: int) -> None:
    ranks = ("train_model.num_devices=8", f"train_model.shard_size={shards}")
    plan = plan_of(tiny, *ranks, "train.mixed_precision=bf16")
    assert plan.shape is not None
    dry_run = dry_run_step(plan)
    expected = collective_bytes(plan, plan.shape)
    assert set(dry_run.sent_bytes) == set(expected)
    for name, size in expected.items():  # a plan counts no biases
        assert dry_run.sent_bytes[name] == pytest.approx(size, rel=0.02), name
    assert step_seconds(plan, dry_run).links > 0
    output = format_dry_run(plan, plan.shape, dry_run)
    assert f"rank             0 of 8 on 1 node(s), shards over {shards}" in output
    assert "reduce-scatter" in output and "assumed:" in output


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_exchanges_of_ranks_that_share_a_microbatch(tiny: str, checkpointing: str) -> None:
    """Layers exchange queries, keys, values and output, once for each pass.

    The ranks divide the arithmetic of the layers and of attention.
    """
    common = (tiny, "train_model.num_devices=2", "inference_model.max_tokens=1000", "policy.kl_coef=0")
    common = (*common, f"train.gradient_checkpointing={checkpointing}")
    plan = plan_of(*common, "train_model.context_parallel=2")
    assert plan.shape is not None
    dry_run, expected = dry_run_step(plan), collective_bytes(plan, plan.shape)
    assert set(dry_run.sent_bytes) == set(expected)
    for name, size in expected.items():
        assert dry_run.sent_bytes[name] == pytest.approx(size, rel=0.02), name
    passes = 3 if checkpointing == "true" else 2
    assert dry_run.collective_calls["all-to-all"] == 4 * passes * plan.shape.num_layers
    assert dry_run.collective_calls["all-reduce"] == 2
    without_exchanges = replace(dry_run, sent_bytes=dry_run.sent_bytes - Counter({"all-to-all": 1 << 60}))
    sent_share = dry_run.sent_bytes["all-to-all"] / 2 / (plan.config.machine.link_gib_s * GIB)
    seconds, fewer = step_seconds(plan, dry_run), step_seconds(plan, without_exchanges)
    assert seconds.links - fewer.links == pytest.approx(sent_share)
    assert "all-to-all" in format_dry_run(plan, plan.shape, dry_run)
    alone = plan_of(*common)
    run_alone = dry_run_step(alone)
    assert 2 * alone.learner.microbatch_rows == plan.learner.microbatch_rows
    assert dry_run.flops == pytest.approx(run_alone.flops, rel=0.02)
    useful_alone = priced_step(alone, plan.shape, run_alone).useful_flops
    assert priced_step(plan, plan.shape, dry_run).useful_flops == pytest.approx(useful_alone, rel=0.02)


@pytest.mark.parametrize("setting", ["prefetch_layers=2", "reshard_after_forward=false"])
def test_collective_bytes_of_other_schedules_equal_the_theory(tiny: str, setting: str) -> None:
    """Layers that stay gathered are gathered once; a prefetch changes no bytes."""
    default, other = (
        plan_of(tiny, "train_model.num_devices=8", "train.mixed_precision=bf16", *more)
        for more in ((), (f"train_model.{setting}",))
    )
    assert other.shape is not None
    sent_bytes, expected = dry_run_step(other).sent_bytes, collective_bytes(other, other.shape)
    assert sent_bytes == pytest.approx(expected, rel=0.02)
    keeps_layers = setting.startswith("reshard")
    assert (expected["all-gather"] < collective_bytes(default, other.shape)["all-gather"]) == keeps_layers


def test_floating_point_operations_of_a_microbatch(tiny: str) -> None:
    """Checkpointing repeats the forward pass of a layer except for its last product.

    The backward pass has two products for each forward product. The head is scored in one chunk, so its forward pass
    runs once. A token attends only to its prompt and its own response. The attention of
    padding is not counted.
    """
    plan = plan_of(tiny, "train.gradient_checkpointing=full", gpus=2)
    rows, shape = plan.learner.microbatch_rows, plan.shape
    assert shape is not None and rows * RESPONSE < 512
    packed, width = PROMPT + rows * (RESPONSE - 1), shape.hidden_size  # the last token predicts nothing
    tokens = padded_positions(packed)
    matrices = width * (2 * width + 2 * width // 2 + 3 * shape.intermediate_size)
    visible_pairs = sum(range(1, PROMPT + 1)) + rows * sum(range(PROMPT + 1, PROMPT + RESPONSE))
    attention = shape.num_heads * visible_pairs * shape.head_dim
    last = 2 * tokens * width * shape.intermediate_size
    layer = (2 + 2) * 2 * tokens * matrices - last + (2 * 4 + 10) * attention
    head = 3 * 2 * rows * RESPONSE * width * shape.vocab_size
    assert dry_run_step(plan).flops == pytest.approx(shape.num_layers * layer + head, rel=0.01)


def test_floating_point_operations_of_whole_rows(tiny: str) -> None:
    """Whole rows repeat the prompt, and their attention is causal."""
    overrides = (tiny, "train.packing=false", "train.gradient_checkpointing=false")
    plan = plan_of(*overrides, gpus=2)
    rows, shape = plan.learner.microbatch_rows, plan.shape
    assert shape is not None and rows * RESPONSE < 512
    length, width = PROMPT + RESPONSE, shape.hidden_size
    matrices = width * (2 * width + 2 * width // 2 + 3 * shape.intermediate_size)
    attention = shape.num_heads * rows * sum(range(1, length + 1)) * shape.head_dim
    layer = 3 * 2 * rows * length * matrices + (4 + 10) * attention
    head = 3 * 2 * rows * RESPONSE * width * shape.vocab_size
    assert dry_run_step(plan).flops == pytest.approx(shape.num_layers * layer + head, rel=0.01)


def test_a_sharded_reference_is_in_the_gathered_dtype(tiny: str) -> None:
    plan = plan_of(tiny, "train_model.num_devices=8", "train.mixed_precision=bf16", "model.dtype=float32")
    assert plan.shape is not None and plan.reference.home == "learner ranks"
    peaks = dry_run_peaks(plan)["score"]
    assert peaks["reference"] == peaks["parameters"] / 2
    assert peaks["reference"] == pytest.approx(reference_bytes(plan.config, plan.shape, 8) / 8, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_separate_scorers_take_no_memory_of_a_rank(tiny: str, ranks: int) -> None:
    overrides = (tiny, f"train_model.num_devices={ranks}")
    plan = plan_of(*overrides, "ref_model.num_devices=2")
    assert (plan.reference.home, plan.reference.ranks) == ("own devices", 2)
    peaks, peaks_without_reference = (dry_run_peaks(one) for one in (plan, plan_of(*overrides, "policy.kl_coef=0")))
    assert "reference" not in peaks["score"]
    assert peaks["optimizer step"] == peaks_without_reference["optimizer step"]


@pytest.mark.parametrize("ranks", [1, 8])
def test_cached_fake_results_equal_computed_ones(tiny: str, ranks: int) -> None:
    """PyTorch computes each cached result a second time.

    The weights have two dtypes although the calls are the same and name no dtype.
    """
    halves = ("train.mixed_precision=bf16", "model.dtype=float32", f"train_model.num_devices={ranks}")
    plan = plan_of(tiny, *halves)
    FakeTensorMode.cache_clear()
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        checked = dry_run_peaks(plan)
    assert FakeTensorMode.cache_info().hits > 500
    assert checked == dry_run_peaks(plan)


def test_gradients_of_earlier_microbatches_and_offloaded_tensors(tiny: str) -> None:
    peaks_of_two_ranks = dry_run_peaks(plan_of(tiny, "train_model.num_devices=2"))
    assert peaks_of_two_ranks["forward"]["gradients"] > 0 and peaks_of_two_ranks["score"]["gradients"] == 0
    one_microbatch = ("train.optim_batch_size=16", "train.gradient_accumulation_steps=1")
    assert dry_run_peaks(plan_of(tiny, "train_model.num_devices=2", *one_microbatch))["forward"]["gradients"] == 0
    offloaded_states = dry_run_peaks(plan_of(tiny, "train_model.num_devices=2", "train_model.offload=optimizer"))
    assert offloaded_states["backward"]["optimizer"] == 0 < offloaded_states["optimizer step"]["optimizer"]
    offloaded_all = dry_run_peaks(plan_of(tiny, "train_model.num_devices=2", "train_model.offload=all"))
    assert offloaded_all["backward"]["parameters"] == 0 < offloaded_all["backward"]["gathered parameters"]
    assert offloaded_all["optimizer step"]["optimizer"] == offloaded_all["optimizer step"]["temporary"] == 0


def test_a_phase_that_does_not_fit_names_config_keys(tiny: str) -> None:
    plan = plan_of(tiny)
    peaks = dry_run_peaks(plan)
    assert oversized_phases(plan, peaks) == []
    small = make_plan(plan.config, False, machine(9, (1.5 * GIB + MIB) / GIB / 0.97))
    problems = {problem.line: problem.text for problem in oversized_phases(small, peaks)}
    assert peak_phase(peaks) in problems
    assert "change train" in problems[peak_phase(peaks)]


MIB = 1 << 20


def test_the_job_ends_with_2_where_it_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_dry_run(*overrides: str) -> str:
        config = config_of("grpo_quickstart", "run=dry_run", *overrides)
        (tmp_path / "unused").mkdir()
        run_job(config, tmp_path / "unused", train, LockstepRun)
        return capsys.readouterr().out

    output = run_dry_run("train_model.num_devices=2")
    assert "all-gather" in output and "plan estimate" in output
    assert not (tmp_path / "unused").exists()
    with pytest.raises(SystemExit) as exit_info:
        run_dry_run("machine.host_memory_gib=0.01")
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "<── does not fit" in captured.out
    assert "this plan cannot work" in captured.err
    with pytest.raises(SystemExit):
        run_dry_run("inference_model.max_tokens=4000")
    assert "prompt plus response may reach 40" in capsys.readouterr().err


def test_the_job_ends_with_2_where_a_scorer_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ("ref_model.name=Qwen/Qwen2.5-32B-Instruct", "ref_model.num_devices=1", "train.mixed_precision=fp32")
    planned_machine = ("device=auto", "machine.gpus=3", "run=dry_run")
    config = config_of("grpo_quickstart", *planned_machine, *large, "policy.kl_coef=0.1")
    (tmp_path / "unused").mkdir()
    with pytest.raises(SystemExit) as exit_info:
        run_job(config, tmp_path / "unused", train, LockstepRun)
    assert exit_info.value.code == 2
    assert "with ref_model.num_devices=1: each scorer GPU needs" in capsys.readouterr().err


def test_a_dry_run_needs_a_model_of_known_sizes() -> None:
    with pytest.raises(ConfigError, match=r"its config\.json is not on this machine"):
        dry_run_peaks(plan_of("model.name=nobody/has-this-model", gpus=2))
