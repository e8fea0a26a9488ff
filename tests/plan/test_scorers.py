"""Tests devices of a separate reference: GPUs, copies or shards, and rejected settings."""

from dataclasses import replace
from typing import Any

import pytest

from config.schema.errors import ConfigError
from tests.plan.test_plan import config_of, machine, text_of
from torchgrpo.plan.host_memory import host_bytes, host_uses
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.model_shape import GIB, find_shape
from torchgrpo.plan.plan import Plan, scorer_phase
from torchgrpo.plan.plan_report import unused_keys
from torchgrpo.plan.problems import check_plan, find_problems
from torchgrpo.plan.remedies import find_remedy

SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "14B", "32B"))
FLOAT32 = ("model.dtype=float32", "train.mixed_precision=fp32")
EACH_SCHEDULE = pytest.mark.parametrize("is_overlapped", [False, True], ids=["grpo", "grpo_async"])


def ranks(train: int, reference: int | None, engines: int) -> tuple[str, ...]:
    counts = {"train_model": train, "ref_model": reference, "inference_model": engines}
    return tuple(f"{section}.num_devices={count}" for section, count in counts.items() if count is not None)


def plan_of(
    *overrides: str, gpus: int, is_overlapped: bool = False, memory: float = 80.0, **machine_fields: Any
) -> Plan:
    planned_machine = machine(gpus, memory, **{"host_memory_gib": 1024.0, "disk_gib": 8192.0} | machine_fields)
    config = config_of("grpo_gsm8k", f"model.name={SMALL}", *overrides)
    return make_plan(config, is_overlapped, planned_machine)


def devices_of(plan: Plan) -> list[str]:
    """Returns the lines of the report's devices section."""
    lines = text_of(plan).partition("devices:\n")[2].partition("batches:")[0].splitlines()
    return [line.strip() for line in lines]


TWO_COPIES = "2 copies that split the microbatches, Ray actors"
SHARDED_RANKS = "ranks, parameters sharded over all of them: GPU"


@EACH_SCHEDULE
@pytest.mark.parametrize(
    ("gpus", "overrides", "learner", "reference", "engines"),
    [
        (3, ranks(1, 1, 1), "GPU 0", "GPU 2, Ray actor", ["1"]),
        (4, ranks(1, 2, 1), "GPU 0", f"GPU 2, 3: {TWO_COPIES}", ["1"]),
        (4, ("ref_model.devices=[3,0]", "train_model.num_devices=1"), "GPU 1", f"GPU 3, 0: {TWO_COPIES}", ["2"]),
        (6, ranks(2, 2, 2), f"2 {SHARDED_RANKS} 0, 1", f"GPU 4, 5: {TWO_COPIES}", ["2", "3"]),
        (
            8,
            (*ranks(4, 2, 2), "inference_model.tensor_parallel_size=2"),
            f"4 {SHARDED_RANKS} 0, 1, 2, 3",
            f"GPU 6, 7: {TWO_COPIES}",
            ["4, 5"],
        ),
        (
            8,
            (*ranks(2, 4, 2), "ref_model.shard_size=2", f"ref_model.name={MIDDLE}"),
            f"2 {SHARDED_RANKS} 0, 1",
            "GPU 4, 5, 6, 7: 4 ranks, parameters sharded in groups of 2 that split the microbatches, Ray "
            f"actors; {MIDDLE}, bfloat16",
            ["2", "3"],
        ),
    ],
)
def test_the_gpus_of_each_component(
    gpus: int, overrides: tuple[str, ...], learner: str, reference: str, engines: list[str], is_overlapped: bool
) -> None:
    plan = plan_of(*overrides, gpus=gpus, is_overlapped=is_overlapped)
    assert not find_problems(plan)
    assert devices_of(plan) == [
        f"train_model      {learner}",
        f"ref_model        {reference}",
        *(f"engine {i}         GPU {on}, vllm, bfloat16, Ray actor" for i, on in enumerate(engines)),
        "weights          travel by nccl in bfloat16",
    ]
    assert not [note for note in plan.notes if "ref_model" in note]


@EACH_SCHEDULE
def test_eight_nodes_of_eight_gpus(is_overlapped: bool) -> None:
    cluster = {"nodes": 8, "is_hypothetical": True}
    nodes = ("train_model.num_nodes=2", "inference_model.tensor_parallel_size=2")
    overrides = (*ranks(16, 16, 32), *nodes, f"ref_model.name={LARGE}")
    plan = plan_of(*overrides, gpus=8, is_overlapped=is_overlapped, memory=40.0, **cluster)
    assert not find_problems(plan)
    assert devices_of(plan)[:3] == [
        "train_model      16 ranks, parameters sharded over all of them: 8 on each of 2 node(s) of the Ray cluster, a "
        "GPU each",
        "ref_model        16 GPU(s) of the Ray cluster: 16 ranks, parameters sharded in groups of 4 that split the "
        f"microbatches, Ray actors; {LARGE}, bfloat16",
        "engine 0         2 GPU(s) of the Ray cluster, vllm, bfloat16, Ray actor",
    ]
    assert len(plan.reference.devices) == plan.reference.ranks == 16
    (problem,) = find_problems(
        plan_of(*overrides, "ref_model.shard_size=16", gpus=8, is_overlapped=is_overlapped, **cluster)
    )
    assert "ref_model.shard_size=16: the ranks of one copy lie on one node, which has 8 GPUs" in problem.text
    (problem,) = find_problems(plan_of(*ranks(16, 32, 32), *nodes, gpus=8, is_overlapped=is_overlapped, **cluster))
    for part in ("train_model.num_devices=16, ref_model.num_devices=32, inference_model.num_devices=32", "80 GPUs"):
        assert part in problem.text


@pytest.mark.parametrize(
    ("name", "memory", "scorers", "shards"),
    [
        (SMALL, 80.0, 4, 1),
        (MIDDLE, 80.0, 4, 1),
        (LARGE, 80.0, 4, 1),
        (LARGE, 48.0, 4, 2),
        (LARGE, 40.0, 4, 4),
        (LARGE, 48.0, 3, 3),
        (LARGE, 24.0, 6, 6),
        ("nobody/has-this-model", 24.0, 4, 1),
    ],
)
def test_scorers_share_a_copy_only_if_a_gpu_is_too_small(name: str, memory: float, scorers: int, shards: int) -> None:
    overrides = (*ranks(1, scorers, 1), f"ref_model.name={name}", "env.max_prompt_tokens=256")
    plan = plan_of(*overrides, gpus=8, memory=memory)
    assert (plan.reference.ranks, plan.reference.shard_size) == (scorers, shards)
    smaller = [size for size in range(1, shards) if scorers % size == 0]
    for size in smaller:
        with_size = plan_of(*overrides, f"ref_model.shard_size={size}", gpus=8, memory=memory)
        assert with_size.reference.shard_size == size
        assert "scorer" in {problem.line for problem in find_problems(with_size)}


def test_the_memory_of_a_scorer() -> None:
    overrides = (*ranks(2, 2, 1), f"ref_model.name={MIDDLE}", "train.mixed_precision=bf16")
    shape = find_shape(MIDDLE)
    assert shape is not None
    whole, half = plan_of(*overrides, "ref_model.dtype=float32", gpus=5), plan_of(*overrides, gpus=5)
    sharded = plan_of(*overrides, "ref_model.shard_size=2", gpus=5)
    weights = [scorer.uses[0].bytes for plan in (whole, half, sharded) if (scorer := scorer_phase(plan))]
    assert weights == [2 * (shape.parameters + shape.head_parameters), 2 * shape.parameters, shape.parameters]
    text = text_of(half)
    for line in (
        f"microbatches, Ray actors; {MIDDLE}, bfloat16",
        f"{shape.parameters / 1e6:.1f} million parameters of {MIDDLE}",
        "scorer           each scorer GPU: ",
        "27.51 GiB  weights of the reference  [ref_model.num_devices, ref_model.shard_size, ref_model.dtype]",
    ):
        assert line in text
    assert "gathered parameters  [ref_model.num_devices" in text_of(sharded)
    alone = plan_of(*ranks(2, None, 1), "policy.kl_coef=0", gpus=5)
    assert [phase.bytes for phase in whole.phases] == [phase.bytes for phase in alone.phases]


def test_a_reference_without_devices_is_counted_beside_the_policy() -> None:
    shape, other = find_shape(SMALL), find_shape(MIDDLE)
    assert shape is not None and other is not None
    reference_model, float32 = f"ref_model.name={MIDDLE}", "model.dtype=float32"

    def added_bytes(*overrides: str, gpus: int, phase: int) -> tuple[str, float]:
        with_reference = plan_of(reference_model, float32, *overrides, gpus=gpus)
        without = plan_of("policy.kl_coef=0", float32, *overrides, gpus=gpus)
        added = round(with_reference.phases[phase].bytes - without.phases[phase].bytes)
        return with_reference.reference.home, added

    assert added_bytes("train_model.num_devices=4", gpus=5, phase=1) == ("learner ranks", 2 * other.parameters / 4)
    whole = 2 * (other.parameters + other.head_parameters)
    assert added_bytes("train_model.num_devices=1", gpus=2, phase=2) == ("training GPU", whole)
    home, size = added_bytes("train_model.num_devices=1", gpus=1, phase=0)
    assert home == "host memory" and size > whole, "its layers are wider than the policy's"
    visiting = plan_of(reference_model, float32, "train_model.num_devices=1", gpus=1)
    assert {use.name: use.bytes for use in host_uses(visiting, shape)}["reference in host memory"] == whole
    lora = ("train_model.lora.enabled=true", "train_model.num_devices=1")
    assert plan_of(reference_model, *lora, gpus=2).reference.home == "training GPU"
    assert plan_of(reference_model, *lora, gpus=3).reference.home == "own devices"
    assert plan_of(*lora, gpus=3).reference.home == "base of the LoRA policy"
    assert plan_of(*lora, "ref_model.num_devices=1", gpus=3).reference.home == "own devices"
    unknown = plan_of("ref_model.name=nobody/has-this-model", "train_model.num_devices=1", gpus=2)
    assert unknown.reference.home == "host memory", "an unknown size may not fit the training GPU"
    assert "unknown: config.json of nobody/has-this-model" in text_of(unknown)


@EACH_SCHEDULE
def test_scorers_of_a_cpu_share_its_cores_and_its_memory(is_overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(9)))
    overrides = ("device=cpu", "model.dtype=float32", *ranks(2, 2, 1))
    plan = plan_of(*overrides, gpus=0, is_overlapped=is_overlapped)
    assert not find_problems(plan)
    assert devices_of(plan)[:3] == [
        "train_model      2 ranks, parameters sharded over all of them: CPU",
        "ref_model        CPU: 2 copies that split the microbatches, Ray actors",
        "engine 0         CPU, transformers, float32, in this process",
    ]
    assert (plan.learner.num_threads, plan.reference.num_threads) == (2, 2), "of 9 cores, or of 8"
    assert plan.ray_cpus == 4
    assert (plan.reference.devices, plan.reference.ranks) == ((), 2)
    assert plan.shape is not None
    (scorers,) = (use.bytes for use in host_uses(plan, plan.shape) if use.name == "scorers")
    scorer = scorer_phase(plan)
    assert scorer is not None and scorers == 2 * scorer.bytes
    less = host_bytes(plan, plan.shape) / GIB - 0.1
    tight = plan_of(*overrides, gpus=0, is_overlapped=is_overlapped, host_memory_gib=less)
    assert tight.reference.shard_size == 2 and not find_problems(tight)
    (problem,) = find_problems(plan_of(*overrides, gpus=0, is_overlapped=is_overlapped, host_memory_gib=8.0))
    assert problem.line == "host memory" and "scorers" in problem.text


def test_ray_reserves_a_core_for_each_scorer() -> None:
    assert plan_of(*ranks(1, None, 1), "policy.kl_coef=0", gpus=3).ray_cpus == 1
    assert plan_of(*ranks(1, None, 1), gpus=3).ray_cpus == 2
    assert plan_of(*ranks(2, 3, 1), gpus=6).ray_cpus == 6


def test_the_reference_packs_and_cuts_logits_as_its_own_model_can(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = {**KNOWN_MODELS[MIDDLE], "model_type": "mistral", "sliding_window": 64, "vocab_size": 300_000}
    monkeypatch.setitem(KNOWN_MODELS, "nobody/windowed", windowed)
    plan = plan_of(*ranks(1, 1, 1), "ref_model.name=nobody/windowed", gpus=3)
    assert (plan.learner.packs, plan.reference.packs) == (True, False)
    assert plan.reference.chunk_size != plan.learner.chunk_size


def test_colocated_learner_and_engines_leave_gpus_to_the_scorers() -> None:
    plan = plan_of(*ranks(1, 2, 1), "inference_model.colocate=true", gpus=3)
    assert (plan.devices.train, plan.devices.engines, plan.reference.devices) == ((0,), ((0,),), (1, 2))


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (
            ranks(2, 3, 2),
            6,
            r"train_model.num_devices=2, ref_model.num_devices=3, inference_model.num_devices=2: 7 GPUs are requested, "
            r"and this machine has 6 GPU\(s\): lower one of them.*take turns \(inference_model.colocate=true",
        ),
        (ranks(1, 1, 1), 2, r"3 GPUs are requested, and this machine has 2 GPU\(s\).*colocate=true"),
        (ranks(1, 2, 1), 2, r"4 GPUs are requested, and this machine has 2 GPU\(s\): lower one of them, leave"),
        ((*ranks(1, 2, 1), "inference_model.colocate=true"), 2, "3 GPUs are requested"),
        (("ref_model.devices=[0,4]",), 4, r"ref_model.devices=\[0, 4\]: \[4\] do not exist; .* GPUs 0 to 3"),
        (
            ("ref_model.devices=[1,2]", "ref_model.num_devices=3"),
            4,
            "has 2 entries but ref_model.num_devices=3: set only one of the two keys",
        ),
        (
            ("ref_model.devices=[1,2]", "train_model.devices=[0,1]"),
            6,
            r"train_model.devices=\[0, 1\] and ref_model.devices=\[1, 2\] share \[1\]",
        ),
        (
            ("ref_model.devices=[1,2]", "inference_model.devices=[2]"),
            6,
            r"ref_model.devices=\[1, 2\] and inference_model.devices=\[2\] share \[2\]: give each its own$",
        ),
        (
            ("device=cpu", "ref_model.devices=[0]"),
            0,
            r"ref_model.devices=\[0\]: this machine has no GPU; set null to run on the CPU",
        ),
        (("ref_model.num_devices=0",), 4, "ref_model.num_devices=0: must be at least 1"),
        (
            ("ref_model.num_devices=4", "ref_model.shard_size=3"),
            8,
            "ref_model.shard_size=3 does not divide the 4 scorer ranks",
        ),
        (
            ("ref_model.shard_size=2",),
            8,
            "ref_model.shard_size=2 without ref_model.num_devices: .*set ref_model.num_devices=2",
        ),
        (
            ("train_model.lora.enabled=true", "train_model.lora.quantization=nf4", "ref_model.num_devices=1"),
            4,
            "quantization=nf4 with ref_model.num_devices=1: the reference is the 4-bit base.*"
            "remove ref_model.num_devices",
        ),
        (
            (*ranks(1, 1, 1), f"ref_model.name={SMALL}", "env.max_prompt_tokens=32768"),
            4,
            f"ref_model.name={SMALL} has 32768 positions, but prompt plus response may reach 33792 tokens: lower "
            "env.max_prompt_tokens",
        ),
        (("ref_model.name=a/b/c/d",), 4, "ref_model.name=a/b/c/d: neither a folder nor a hub name"),
        (("ref_model.name=tests",), 4, "ref_model.name=tests: the folder has no config.json"),
        (
            (*ranks(1, 1, 1), f"ref_model.name={LARGE}", *FLOAT32),
            4,
            f"ref_model.name={LARGE} with ref_model.num_devices=1: each scorer GPU needs about 12.* and has 80.00 GiB, "
            "of which .*raise ref_model.num_devices, .*ref_model.dtype=bfloat16, or choose a smaller model",
        ),
        (
            (*ranks(1, 2, 1), f"ref_model.name={LARGE}", "ref_model.shard_size=1", *FLOAT32),
            4,
            "leave ref_model.shard_size=1 unset, so that more ranks share a copy, set ref_model.dtype=bfloat16",
        ),
    ],
)
def test_scorers_that_cannot_work(overrides: tuple[str, ...], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(plan_of(*overrides, gpus=gpus))


def test_ray_chooses_the_gpus_of_scorers_on_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"ref_model.devices=\[1, 2\]: scorers are on the Ray cluster.*num_devices=2"):
        plan_of("ref_model.devices=[1,2]", "ray.address=auto", gpus=4)
    plan = plan_of(*ranks(1, 6, 1), "ray.address=auto", gpus=1)
    assert len(plan.reference.devices) == 6, "the GPUs are on the cluster, not on this machine"


def test_a_reference_without_devices_has_no_gpu_of_a_cluster() -> None:
    for machine_fields in ({"nodes": 8, "is_hypothetical": True}, {}):
        plan = plan_of(*(() if machine_fields else ("ray.address=auto",)), gpus=8, **machine_fields)
        assert (plan.devices.scorers, plan.reference.home) == (0, "training GPU")
        assert any("no GPU of the Ray cluster is used for ref_model: the ref" in note for note in plan.notes)
    assert plan_of(gpus=8).reference.home == "own devices"


def test_remedies_for_scorers() -> None:
    def advised_settings(*overrides: str, gpus: int, **machine_fields: Any) -> str:
        plan = plan_of(*overrides, gpus=64)
        return " ".join(map(str, find_remedy(plan, plan_of(gpus=gpus, **machine_fields).machine) or ()))

    exact = (*FLOAT32, f"ref_model.name={LARGE}")
    assert advised_settings(*ranks(1, 1, 1), *exact, gpus=8) == "ref_model.num_devices=3"
    assert advised_settings(*ranks(1, 1, 1), *exact, gpus=3) == "ref_model.dtype=bfloat16"
    assert advised_settings(*ranks(1, 4, 1), "ref_model.shard_size=1", *exact, gpus=8) == "ref_model.shard_size=null"
    assert advised_settings(*ranks(2, 4, 2), gpus=6) == "ref_model.num_devices=2"
    assert advised_settings(*ranks(2, 4, 2), gpus=4) == "ref_model.num_devices=null"


def test_unused_keys_of_a_reference() -> None:
    keys = ("ref_model.num_devices=2", f"ref_model.name={SMALL}", "ref_model.dtype=bfloat16")
    assert unused_keys(plan_of(*keys, gpus=5)) == []
    unused = unused_keys(plan_of(*keys, "policy.kl_coef=0", gpus=5))
    assert sorted(unused) == sorted(
        f"{key}: nothing scores with ref_model: policy.kl_coef=0 and policy.distill_coef=0" for key in keys
    )
    base = plan_of("ref_model.dtype=bfloat16", "train_model.lora.enabled=true", gpus=5)
    assert unused_keys(base) == ["ref_model.dtype=bfloat16: the base of the LoRA policy is the reference"]


def test_an_unused_reference_has_no_scorers() -> None:
    plan = plan_of("ref_model.num_devices=2", "policy.kl_coef=0", "ref_model.name=a/b/c/d", gpus=5)
    assert (plan.reference.ranks, plan.reference.home, plan.ray_cpus) == (0, "none", 1)
    assert scorer_phase(replace(plan, reference_shape=plan.shape)) is None
