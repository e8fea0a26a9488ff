"""Tests the estimate of host memory and the message about too little memory."""

from pathlib import Path

import pytest

from config.schema.errors import ConfigError
from tests.plan.test_plan import config_of, machine
from torchgrpo.plan.host_memory import host_uses
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import format_gib
from torchgrpo.plan.model_shape import GIB
from torchgrpo.plan.plan_report import format_plan
from torchgrpo.plan.problems import find_problems

SMALL = "model.name=Qwen/Qwen2.5-0.5B-Instruct"


def test_the_copy_of_the_last_push_needs_room_in_the_hosts_memory() -> None:
    """Weights of vLLM's native transfer are copied too, in the engines' dtype (bfloat16).

    An engine in the learner's process needs no copy.
    """
    config = config_of("grpo_gsm8k", SMALL, "policy.kl_coef=0", "train.async_checkpoint=false")
    roomy = make_plan(config, False, machine(2, 80.0))
    assert roomy.transport == "nccl" and roomy.shape is not None
    copy = 2 * roomy.shape.parameters
    assert [(use.name, use.bytes) for use in host_uses(roomy, roomy.shape)] == [("copy of the last push", copy)]
    assert not find_problems(roomy)
    full = make_plan(config, False, machine(2, 80.0, host_memory_gib=0.9 * copy / GIB))
    (problem,) = find_problems(full)
    assert problem.line == "host memory" and "(copy of the last push" in problem.text
    assert "copy of the last push" in format_plan(full, find_problems(full))
    alone = make_plan(config, False, machine(1, 80.0))
    assert alone.transport == "in_process" and host_uses(alone, roomy.shape) == []


def test_the_copy_of_an_adapter_is_as_large_as_the_adapter() -> None:
    lora = (
        *("train_model.lora.enabled=true", "inference_model.lora=adapter", "policy.kl_coef=0"),
        "train.async_checkpoint=false",
    )
    plan = make_plan(config_of("grpo_gsm8k", SMALL, *lora), False, machine(2, 80.0))
    assert plan.shape is not None
    (copy,) = host_uses(plan, plan.shape)
    assert copy.bytes == 2 * plan.shape.lora_parameters(plan.config.train_model.lora.r)


def test_a_sleeping_engine_with_adapters_keeps_its_base_in_host_memory() -> None:
    """With merged weights the engine drops them, since the next push brings new ones."""
    lora = ("train_model.lora.enabled=true", "train.async_checkpoint=false", "inference_model.sleep=true")
    config = config_of("grpo_gsm8k", SMALL, *lora, "inference_model.lora=adapter")
    plan = make_plan(config, False, machine(1, 80.0))
    assert plan.shape is not None
    (base,) = host_uses(plan, plan.shape)
    assert (base.name, base.bytes) == ("weights of sleeping engines", 2 * plan.shape.parameters)
    (note,) = [note for note in plan.notes if "inference_model.lora=adapter" in note]
    assert f"moves {format_gib(base.bytes)} of base weights to host memory" in note
    full = make_plan(config, False, machine(1, 80.0, host_memory_gib=0.9 * base.bytes / GIB))
    (problem,) = find_problems(full)
    assert problem.line == "host memory" and "(weights of sleeping engines" in problem.text
    for other in ("inference_model.lora=merge", "inference_model.sleep=false"):
        awake_or_merged = config_of("grpo_gsm8k", SMALL, *lora, "inference_model.lora=adapter", other)
        other_plan = make_plan(awake_or_merged, False, machine(1, 80.0))
        assert host_uses(other_plan, plan.shape) == []
        assert not any("inference_model.lora=adapter" in note for note in other_plan.notes)


def test_a_checkpoint_is_written_from_a_copy_unless_the_run_waits() -> None:
    """The copy has float32 weights and the two moments of AdamW."""
    config = config_of("grpo_gsm8k", SMALL, "policy.kl_coef=0", "model.dtype=float32")
    plan = make_plan(config, False, machine(1, 80.0))
    assert plan.shape is not None
    (copy,) = host_uses(plan, plan.shape)
    assert (copy.name, copy.bytes) == ("copy for a checkpoint", 12 * plan.shape.parameters)
    full = make_plan(config, False, machine(1, 80.0, host_memory_gib=0.9 * copy.bytes / GIB))
    (problem,) = find_problems(full)
    assert problem.line == "host memory" and "(copy for a checkpoint" in problem.text
    waits = config_of("grpo_gsm8k", SMALL, "policy.kl_coef=0", "train.async_checkpoint=false")
    assert host_uses(make_plan(waits, False, machine(1, 80.0)), plan.shape) == []


def test_shards_of_scorers_are_filled_from_whole_models_in_the_hosts_memory() -> None:
    """A node loads one whole model for each copy on it."""
    large = ("ref_model.name=Qwen/Qwen2.5-32B-Instruct", "train.mixed_precision=bf16")
    devices = ("train_model.num_devices=1", "inference_model.num_devices=1", "ref_model.num_devices=4")

    def loading(*overrides: str, gpus: int = 8, nodes: int = 1) -> float:
        planned_machine = machine(gpus, 80.0, nodes=nodes, is_hypothetical=True)
        plan = make_plan(config_of("grpo_gsm8k", SMALL, *large, *devices, *overrides), False, planned_machine)
        assert plan.shape is not None and plan.reference_shape is not None
        (used, *_) = [use.bytes for use in host_uses(plan, plan.shape) if use.name == "scorers while they load"] or [
            0.0
        ]
        return used / (2 * plan.reference_shape.parameters)

    assert [loading(f"ref_model.shard_size={size}") for size in (1, 2, 4)] == [0, 2, 1]
    assert loading("ref_model.shard_size=2", gpus=2, nodes=4) == 1, "a node has no room for two copies"
    config = config_of("grpo_gsm8k", SMALL, *large, *devices, "ref_model.shard_size=2")
    (problem,) = find_problems(make_plan(config, False, machine(8, 80.0, host_memory_gib=100.0)))
    assert problem.line == "host memory" and "scorers while they load 122" in problem.text


def test_an_engine_of_another_process_than_the_learners_holds_its_weights_packed_too() -> None:
    """In the same process the learner reuses the memory of packed weights."""
    config = ("grpo_gsm8k", SMALL, "model.dtype=float32", "device=cpu", "inference_model.backend=transformers")
    two = "inference_model.num_devices=2"
    engine_bytes = []
    for is_overlapped, overrides in ((False, ()), (True, ()), (False, (two,))):
        plan = make_plan(config_of(*config, *overrides), is_overlapped, machine(0, None))
        assert plan.shape is not None
        (engines,) = (use.bytes for use in host_uses(plan, plan.shape) if use.name == "engines")
        engine_bytes.append(engines)
    assert engine_bytes[1] - engine_bytes[0] == 4 * plan.shape.parameters
    assert engine_bytes[2] == 2 * engine_bytes[1]


def test_a_reward_model_counts_on_the_cpu_and_is_named_on_a_used_gpu() -> None:
    """A reward model has the dtype of `env.reward_model.dtype`."""
    name = ("env.reward=[exact,reward_model]", "env.reward_model.name=Qwen/Qwen2.5-7B-Instruct")

    def use_and_notes(*overrides: str, gpus: int = 2) -> tuple[float, str]:
        config = config_of("grpo_gsm8k", SMALL, *name, *overrides)
        plan = make_plan(config, False, machine(gpus, 80.0))
        assert plan.shape is not None
        return sum(use.bytes for use in host_uses(plan, plan.shape) if use.name == "reward model"), str(plan.notes)

    parameters = 7_070_619_136  # of the layers, the final norm and the embedding; there is no head over the vocabulary
    assert use_and_notes()[0] == pytest.approx(4 * parameters, rel=1e-4)
    assert use_and_notes("env.reward_model.dtype=bfloat16")[0] == pytest.approx(2 * parameters, rel=1e-4)
    for device in ("cuda", "cuda:0", "cuda:1"):
        size, notes = use_and_notes(f"env.reward_model.device={device}")
        assert size == 0 and f"env.reward_model.device={device}: learner" in notes
    devices = ("train_model.devices=[0]", "inference_model.devices=[1]", "policy.kl_coef=0")
    unused = ("env.reward_model.device=cuda:2", *devices)
    assert "env.reward_model.device" not in use_and_notes(*unused, gpus=3)[1]
    config = config_of("grpo_gsm8k", SMALL, *name)
    (problem,) = find_problems(make_plan(config, False, machine(2, 80.0, host_memory_gib=20.0)))
    assert problem.line == "host memory" and "reward model 26.34 GiB" in problem.text


def test_a_reward_model_without_a_config_is_refused(tmp_path: Path) -> None:
    """The message names the setting of the reward model."""
    config = config_of("grpo_gsm8k", SMALL, "env.reward=reward_model", f"env.reward_model.name={tmp_path}")
    plan = make_plan(config, False, machine(2, 80.0))
    assert plan.shape is not None
    with pytest.raises(ConfigError, match=rf"^env.reward_model.name={tmp_path}: the folder has no config.json"):
        host_uses(plan, plan.shape)
