"""One rank's step without memory: bytes of collectives and FLOPs by hand, what is printed, how it ends."""

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

from config.schema.errors import ConfigError
from grpo import train
from tests.plan.test_plan import config_of, machine
from tests.rehearsal.test_tracking import TINY
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import reference_bytes
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan import Plan
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.rehearsal.rehearsal_text import report, too_large
from torchgrpo.run.rehearsal.roofline import seconds, theory
from torchgrpo.run.rehearsal.step import fullest, rehearse, rehearse_memory

PROMPT, RESPONSE = 40, 24


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"model.name={tmp_path}"


def plan_of(*overrides: str, gpus: int = 9) -> Plan:
    lengths = (f"env.max_prompt_tokens={PROMPT}", f"inference_model.max_tokens={RESPONSE}")
    return make_plan(config_of("grpo_gsm8k", *lengths, *overrides), False, machine(gpus, 80.0))


@pytest.mark.parametrize("shards", [8, 4])
def test_what_is_sent_is_what_theory_says(tiny: str, shards: int) -> None:
    ranks = ("train_model.num_devices=8", f"train_model.shard_size={shards}")
    plan = plan_of(tiny, *ranks, "train.mixed_precision=bf16")
    assert plan.shape is not None
    rehearsal = rehearse(plan)
    expected = theory(plan, plan.shape)
    assert set(rehearsal.sent) == set(expected)
    for name, size in expected.items():  # a plan counts no biases
        assert rehearsal.sent[name] == pytest.approx(size, rel=0.02), name
    assert seconds(plan, rehearsal).links > 0
    printed = report(plan, plan.shape, rehearsal)
    assert f"rank             0 of 8 on 1 node(s), shards over {shards}" in printed
    assert "reduce-scatter" in printed and "assumed:" in printed


def test_floating_point_operations_of_a_microbatch(tiny: str) -> None:
    """Checkpointing: a layer forward, once more but for its last product, and backward, which is two products for one.
    The head is scored in one chunk, so once forward. A token attends to its prompt and its own response alone."""
    plan = plan_of(tiny, gpus=2)
    rows, shape = plan.learner.microbatch_rows, plan.shape
    assert shape is not None and rows * RESPONSE < 512
    tokens, width = PROMPT + rows * (RESPONSE - 1), shape.hidden_size  # nothing follows the last token
    matrices = width * (2 * width + 2 * width // 2 + 3 * shape.intermediate_size)
    seen = sum(range(1, PROMPT + 1)) + rows * sum(range(PROMPT + 1, PROMPT + RESPONSE))
    attention = shape.num_heads * seen * shape.head_dim
    last = 2 * tokens * width * shape.intermediate_size
    layer = (2 + 2) * 2 * tokens * matrices - last + (2 * 4 + 10) * attention
    head = 3 * 2 * rows * RESPONSE * width * shape.vocab_size
    assert rehearse(plan).flops == pytest.approx(shape.num_layers * layer + head, rel=0.01)


def test_attention_of_whole_rows(tiny: str) -> None:
    """They repeat the prompt and are causal."""
    asked = (tiny, "train.packing=false", "train.gradient_checkpointing=false")
    plan = plan_of(*asked, gpus=2)
    rows, shape = plan.learner.microbatch_rows, plan.shape
    assert shape is not None and rows * RESPONSE < 512
    length, width = PROMPT + RESPONSE, shape.hidden_size
    matrices = width * (2 * width + 2 * width // 2 + 3 * shape.intermediate_size)
    attention = shape.num_heads * rows * sum(range(1, length + 1)) * shape.head_dim
    layer = 3 * 2 * rows * length * matrices + (4 + 10) * attention
    head = 3 * 2 * rows * RESPONSE * width * shape.vocab_size
    assert rehearse(plan).flops == pytest.approx(shape.num_layers * layer + head, rel=0.01)


def test_a_sharded_reference_is_kept_as_it_is_gathered(tiny: str) -> None:
    plan = plan_of(tiny, "train_model.num_devices=8", "train.mixed_precision=bf16", "model.dtype=float32")
    assert plan.shape is not None and plan.reference.home == "learner ranks"
    held = rehearse_memory(plan)["score"]
    assert held["reference"] == held["parameters"] / 2
    assert held["reference"] == pytest.approx(reference_bytes(plan.config, plan.shape, 8) / 8, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scorers_of_their_own_take_nothing_of_a_rank(tiny: str, ranks: int) -> None:
    asked = (tiny, f"train_model.num_devices={ranks}")
    plan = plan_of(*asked, "ref_model.num_devices=2")
    assert (plan.reference.home, plan.reference.ranks) == ("own devices", 2)
    held, without = (rehearse_memory(one) for one in (plan, plan_of(*asked, "policy.kl_coef=0")))
    assert "reference" not in held["score"]
    assert held["optimizer step"] == without["optimizer step"]


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_is_remembered_of_fake_results_is_what_they_are(tiny: str, ranks: int) -> None:
    """PyTorch computes each of them once more. Weights come in two dtypes, by the same calls, which name no dtype."""
    halves = ("train.mixed_precision=bf16", "model.dtype=float32", f"train_model.num_devices={ranks}")
    plan = plan_of(tiny, *halves)
    FakeTensorMode.cache_clear()
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        checked = rehearse_memory(plan)
    assert FakeTensorMode.cache_info().hits > 500
    assert checked == rehearse_memory(plan)


def test_gradients_of_earlier_microbatches_and_what_is_offloaded(tiny: str) -> None:
    several = rehearse_memory(plan_of(tiny, "train_model.num_devices=2"))
    assert several["forward"]["gradients"] > 0 and several["score"]["gradients"] == 0
    once = ("train.optim_batch_size=16", "train.gradient_accumulation_steps=1")
    assert rehearse_memory(plan_of(tiny, "train_model.num_devices=2", *once))["forward"]["gradients"] == 0
    states = rehearse_memory(plan_of(tiny, "train_model.num_devices=2", "train_model.offload=optimizer"))
    assert states["backward"]["optimizer"] == 0 < states["optimizer step"]["optimizer"]
    everything = rehearse_memory(plan_of(tiny, "train_model.num_devices=2", "train_model.offload=all"))
    assert everything["backward"]["parameters"] == 0 < everything["backward"]["gathered parameters"]
    assert everything["optimizer step"]["optimizer"] == everything["optimizer step"]["temporary"] == 0


def test_what_does_not_fit_is_named_with_the_keys_that_change_it(tiny: str) -> None:
    plan = plan_of(tiny)
    peaks = rehearse_memory(plan)
    assert too_large(plan, peaks) == []
    small = make_plan(plan.config, False, machine(9, (1.5 * GIB + MIB) / GIB / 0.97))
    found = {problem.line: problem.text for problem in too_large(small, peaks)}
    assert fullest(peaks) in found
    assert "change train" in found[fullest(peaks)]


MIB = 1 << 20


def test_the_job_ends_with_2_where_it_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearsed(*overrides: str) -> str:
        config = config_of("grpo_quickstart", "run=rehearse", *overrides)
        (tmp_path / "unused").mkdir()
        run_job(config, tmp_path / "unused", train, Lockstep)
        return capsys.readouterr().out

    printed = rehearsed("train_model.num_devices=2")
    assert "all-gather" in printed and "run=plan says" in printed
    assert not (tmp_path / "unused").exists()
    with pytest.raises(SystemExit) as ended:
        rehearsed("plan.host_memory_gib=0.01")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "<── does not fit" in told.out
    assert "this cannot work" in told.err
    with pytest.raises(SystemExit):
        rehearsed("inference_model.max_tokens=4000")
    assert "prompt plus response may reach 40" in capsys.readouterr().err


def test_the_job_ends_with_2_where_a_scorer_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = (
        "ref_model.name=Qwen/Qwen2.5-32B-Instruct",
        "ref_model.num_devices=1",
        "train.mixed_precision=fp32",
    )
    there = ("device=auto", "plan.gpus=3", "run=rehearse")
    config = config_of("grpo_quickstart", *there, *large, "policy.kl_coef=0.1")
    (tmp_path / "unused").mkdir()
    with pytest.raises(SystemExit) as ended:
        run_job(config, tmp_path / "unused", train, Lockstep)
    assert ended.value.code == 2
    assert "with ref_model.num_devices=1: each scorer GPU needs" in capsys.readouterr().err


def test_a_model_that_is_not_known_cannot_be_rehearsed() -> None:
    with pytest.raises(ConfigError, match=r"its config\.json is not on this machine"):
        rehearse_memory(plan_of("model.name=nobody/has-this-model", gpus=2))
