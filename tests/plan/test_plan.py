"""Tests `run=plan`: batch sizes, estimates and errors, without torch and without a device."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from config.cli.composition import to_config
from config.run_folder.checkpoints import checkpoint_path
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.machine import MachineConfig
from tests.config_composition import compose_config
from torchgrpo.plan.machine import Machine, configured_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import engine_weight_bytes, kv_bytes_per_sequence, train_phases
from torchgrpo.plan.microbatch_sizes import longest_microbatch, longest_microbatch_rows, microbatch_tokens
from torchgrpo.plan.model_shape import GIB, find_config_file, kv_cache_bytes, read_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_report import format_plan, unused_keys
from torchgrpo.plan.problems import check_plan, find_problems

PROJECT = Path(__file__).resolve().parents[2]
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def config_of(name: str, *overrides: str) -> Config:
    return to_config(compose_config(name, *overrides))


def machine(gpus: int, gpu_memory_gib: float | None = None, vllm: str | None = "0.32.0", **fields: Any) -> Machine:
    """Makes a machine of known size, independent of this machine."""
    size = {"host_memory_gib": 64.0, "disk_gib": 1024.0} | fields
    return Machine(gpus, gpu_memory_gib if gpus else None, vllm=vllm, gpu_ids=tuple(map(str, range(gpus))), **size)


def text_of(plan: Plan) -> str:
    return format_plan(plan, find_problems(plan))


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return f"model.name={tmp_path}"


def gpu_plan(*overrides: str, gpus: int = 2, is_overlapped: bool = False) -> Plan:
    return make_plan(config_of("grpo_gsm8k", *overrides), is_overlapped, machine(gpus))


def test_sizes_of_a_real_model_come_from_its_config(qwen: str) -> None:
    shape = read_shape(Path(qwen.partition("=")[2]) / "config.json")
    assert shape.parameters == pytest.approx(3.086e9, rel=0.001)  # Qwen2.5-3B's card: 3.09 billion
    assert shape.kv_bytes_per_token(2) == 2 * 36 * 2 * 128 * 2
    assert shape.lora_parameters(8) == 36 * 8 * (4 * 2048 + 2 * (2048 + 256) + 3 * (2048 + 11008))


def test_parameters_are_exact_for_the_model_of_this_repository() -> None:
    from safetensors import safe_open

    folder = PROJECT / "torchgrpo" / "models" / "quickstart"
    count = 0
    with safe_open(folder / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            count += math.prod(file.get_slice(name).get_shape())
    path = find_config_file(str(folder))
    assert path is not None
    assert read_shape(path).parameters == count


def test_the_cache_holds_every_sequence_up_to_a_bound(qwen: str) -> None:
    shape = read_shape(Path(qwen.partition("=")[2]) / "config.json")
    block = 128 * shape.kv_bytes_per_token(4)
    assert kv_cache_bytes(shape, max_model_len=100, max_num_seqs=8, dtype_bytes=4) == 8 * block
    assert kv_cache_bytes(shape, max_model_len=129, max_num_seqs=8, dtype_bytes=4) == 16 * block
    assert kv_cache_bytes(shape, max_model_len=1536, max_num_seqs=256, dtype_bytes=4) == 4 * GIB
    assert kv_cache_bytes(shape, max_model_len=1 << 16, max_num_seqs=1, dtype_bytes=4) == 2 * 512 * block


def test_the_report_of_the_quickstart() -> None:
    text = text_of(make_plan(config_of("grpo_quickstart"), False, machine(0, vllm=None)))
    for line in (
        "train_model      CPU",
        "engine 0         CPU, transformers, float32, in this process",
        "32 prompts x 8 completions = 256 completions",
        "120 iterations, 120 optimizer steps",
        "1.0 million parameters",
        "[train.max_tokens_per_microbatch, gradient_accumulation_steps, inference_model.max_tokens]",
        "KV cache         grows to",
        "free  [train.keep_checkpoints",
    ):
        assert line in text


def test_the_report_for_two_gpus(qwen: str) -> None:
    plan = gpu_plan(qwen)
    text = text_of(plan)
    for line in (
        "train_model      GPU 0",
        "engine 0         GPU 1, vllm, bfloat16, Ray actor",
        "weights          travel by nccl in bfloat16",
    ):
        assert line in text
    assert "8 microbatches x 16; 4 steps per iteration" in text
    assert "up to 196608 per optimizer step, 16896 positions in a microbatch" in text
    assert plan.shape is not None
    assert f"1 GiB holds {GIB / kv_bytes_per_sequence(plan.config, plan.shape, 'bfloat16'):.1f} sequences" in text


def test_the_quickstarts_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "1.0 million parameters" in text_of(make_plan(config_of("grpo_quickstart"), False, machine(0, vllm=None)))


def test_a_model_without_a_local_config_still_has_a_plan() -> None:
    text = text_of(gpu_plan("model.name=nobody/has-this-model"))
    assert "unknown: config.json of nobody/has-this-model is not on this machine yet" in text
    assert "32 prompts x 16 completions" in text


def test_the_listed_keys_change_the_estimate(qwen: str) -> None:
    base = gpu_plan(qwen)
    assert base.shape is not None

    def activations(*overrides: str) -> float:
        config = gpu_plan(qwen, *overrides).config
        assert base.shape is not None
        optimize = train_phases(config, base.shape, on_cpu=False)[1]
        return next(use.bytes for use in optimize.uses if use.name.startswith("activations"))

    assert activations("train.gradient_accumulation_steps=4") == 2 * activations()
    assert activations("train.gradient_checkpointing=false", "train.packing=false") > 10 * activations()
    assert activations("inference_model.max_tokens=512") < activations()
    shared = gpu_plan(qwen, "train.gradient_checkpointing=false").config
    assert microbatch_tokens(shared, base.shape) == 512 + 16 * 1024
    lora = gpu_plan(qwen, "train_model.lora.enabled=true")
    assert peak_bytes(lora) < 0.5 * peak_bytes(base)
    split = ["inference_model.num_devices=2", "inference_model.tensor_parallel_size=2"]
    halved = engine_weight_bytes(gpu_plan(qwen, *split, gpus=4).config, base.shape, "bfloat16", on_cpu=False)
    assert 2 * halved == engine_weight_bytes(base.config, base.shape, "bfloat16", on_cpu=False)


def peak_bytes(plan: Plan) -> float:
    assert plan.shape is not None
    phases = train_phases(plan.config, plan.shape, on_cpu=False)
    return max(phase.bytes for phase in phases)


def check_fails(match: str, *overrides: str, name: str = "grpo_gsm8k", gpus: int = 2, **fields: Any) -> None:
    is_overlapped = fields.pop("is_overlapped", False)
    with pytest.raises(ConfigError, match=match):
        check_plan(make_plan(config_of(name, *overrides), is_overlapped, machine(gpus, **fields)))


def test_plans_that_cannot_work(qwen: str) -> None:
    check_fails("device=cuda: this machine has no NVIDIA GPU", qwen, gpus=0)
    check_fails("vLLM is not installed", qwen, "inference_model.backend=vllm", vllm=None)
    check_fails("has 32768 positions", qwen, "inference_model.max_tokens=40000")
    split = ["inference_model.num_devices=3", "inference_model.tensor_parallel_size=3"]
    check_fails("=3 does not divide the 16 attention heads", qwen, *split, gpus=4)
    check_fails("needs inference_model.backend=vllm", qwen, "inference_model.backend=transformers",
                "inference_model.num_devices=2", "inference_model.tensor_parallel_size=2", gpus=4)  # fmt: skip
    check_fails("enabled=false, so there is no adapter to send", qwen, "inference_model.lora=adapter")
    nf4 = ("train_model.lora.enabled=true", "train_model.lora.quantization=nf4")
    check_fails(r"nf4 needs bitsandbytes: run pip install -e '\.\[qlora\]' in the project's", qwen, *nf4)
    check_fails("cannot release its memory", qwen, "inference_model.backend=transformers", gpus=1)
    check_fails("runs learner and engines at the same time", qwen, gpus=1, is_overlapped=True)


def test_a_kv_cache_that_holds_no_sequence(qwen: str) -> None:
    no_sequence = "does not hold one sequence of 1536 tokens"
    check_fails(rf"{no_sequence} .*: raise inference_model.kv_cache_gib", qwen, "inference_model.kv_cache_gib=0.01")
    share, beside = "inference_model.gpu_memory_utilization=0.05", r"the engine needs \d+\.\d+ GiB beside the cache"
    check_fails(
        rf"{no_sequence} .*; {beside} and has 5% of a GPU: raise .*utilization, lower", qwen, share, gpu_memory_gib=80
    )
    left = rf"{no_sequence} .*; {beside}, and the learner leaves 0% of the GPU: set .*=fp8, train"
    check_fails(left, qwen, gpus=1, gpu_memory_gib=24)


def test_too_little_memory_names_the_largest_part(qwen: str) -> None:
    check_fails(
        r"a GPU has 24.00 GiB, .* the largest part of phase optimize is optimizer state with .*: change "
        "train_model.num_devices, train_model.offload, train_model.lora.enabled, optimizer.name",
        qwen,
        gpu_memory_gib=24,
    )
    large = make_plan(config_of("grpo_gsm8k", qwen), False, machine(2, 141.0))
    assert not find_problems(large)
    assert "full sequences; at most 512 run" in text_of(large)
    cpu = ["device=cpu", "inference_model.max_tokens=16384", "train.gradient_checkpointing=false"]
    check_fails(r"this machine's memory is 64.00 GiB.* activations of", qwen, *cpu)


def test_too_little_disk(qwen: str) -> None:
    alone = "train.export=false"
    check_fails("checkpoints would take 6.*lower train.keep_checkpoints, or", qwen, alone, disk_gib=1.0)
    check_fails("would take .* with the models beside them.*train.export=false", qwen, disk_gib=1.0)


def test_checkpoints_that_are_there_need_no_more_room(qwen: str, tmp_path: Path) -> None:
    """A resumed run has checkpoints in its folder; the file here is sparse."""
    config = config_of("grpo_gsm8k", qwen, "train.export=false")
    plan = make_plan(config, False, machine(2, disk_gib=40.0), tmp_path)
    with pytest.raises(ConfigError, match="checkpoints would take"):
        check_plan(plan)
    folder = checkpoint_path(tmp_path, 1) / "learner"
    folder.mkdir(parents=True)
    with (folder / "__0_0.distcp").open("wb") as file:
        file.truncate(35 * GIB)
    check_plan(plan)


def test_all_problems_are_reported_together(qwen: str) -> None:
    plan = make_plan(
        config_of("grpo_gsm8k", qwen, "inference_model.max_tokens=40000"), False, machine(2, 24.0, disk_gib=1.0)
    )
    with pytest.raises(ConfigError) as raised:
        check_plan(plan)
    for line in ("has 32768 positions", "phase optimize needs", "checkpoints would take"):
        assert line in str(raised.value)
    marked = [line for line in text_of(plan).splitlines() if line.endswith("does not fit")]
    assert [line.split("  ")[1].strip() for line in marked][-1] == "checkpoints"
    assert len(marked) >= 4


def test_unused_keys_are_listed() -> None:
    config = config_of(
        "grpo_quickstart",
        "inference_model.backend=transformers",
        "inference_model.gpu_memory_utilization=0.5",
        "inference_model.update=abort",
        "train.max_policy_age=3",
        "policy.kl_coef=0",
        "ref_model.num_devices=2",
    )
    listed = "\n".join(unused_keys(make_plan(config, False, machine(0))))
    for key in ("gpu_memory_utilization=0.5", "update=abort", "max_policy_age=3", "ref_model.num_devices=2"):
        assert key in listed
    assert "max_policy_age" not in "\n".join(unused_keys(make_plan(config, True, machine(0))))
    assert unused_keys(make_plan(config_of("grpo_quickstart"), False, machine(0))) == []
    one_turn = config_of("grpo_quickstart", "env.max_episode_tokens=900", "env.tool_result_characters=900")
    listed = "\n".join(unused_keys(make_plan(one_turn, False, machine(0))))
    assert "max_episode_tokens=900" in listed and "tool_result_characters=900" in listed


def test_a_configured_machine(qwen: str) -> None:
    local = machine(0, vllm=None)
    settings = config_of(
        "grpo_gsm8k", qwen, "run=plan", "machine.gpus=8", "machine.gpu_memory_gib=80", "machine.nodes=8"
    ).machine
    cluster = configured_machine(settings, local)
    assert (cluster.num_gpus, cluster.nodes) == (8, 8)
    assert (cluster.gpu_memory_gib, cluster.is_hypothetical) == (80.0, True)
    plan = make_plan(config_of("grpo_gsm8k", qwen), True, cluster)
    assert (plan.transport, plan.devices.on_cluster) == ("nccl", True)
    assert "62 of 64 GPU(s) are unused: set inference_model.num_devices=63 to generate on all GPUs" in plan.notes
    assert configured_machine(MachineConfig(), local) is local
    assert (cluster.host_memory_gib, cluster.disk_gib) == (None, None)
    two_gpus = configured_machine(MachineConfig(gpus=2, disk_gib=9.0), local)
    assert (two_gpus.gpu_memory_gib, two_gpus.host_memory_gib, two_gpus.disk_gib) == (80.0, None, 9.0)
    local_with_disk = configured_machine(MachineConfig(disk_gib=9.0), local)
    assert (local_with_disk.host_memory_gib, local_with_disk.disk_gib) == (local.host_memory_gib, 9.0)
    with pytest.raises(ConfigError, match="gpu_memory_gib=80: the planned machine has no GPU"):
        configured_machine(MachineConfig(gpu_memory_gib=80.0), local)
    with pytest.raises(ConfigError, match="disk_gib=inf: must be a number above 0"):
        MachineConfig(disk_gib=math.inf)
    too_many = config_of("grpo_gsm8k", qwen, "inference_model.num_devices=64")
    with pytest.raises(ConfigError, match="65 GPUs are needed, and 8 nodes have 64"):
        check_plan(make_plan(too_many, True, cluster))


def test_a_training_run_rejects_a_configured_machine() -> None:
    with pytest.raises(ConfigError, match=r"machine\.\* describes a machine to plan for, but run=train"):
        config_of("grpo_gsm8k", "machine.gpus=8")


def test_half_precision_engines_schedule_ahead_only_if_no_push_can_fall_between(qwen: str) -> None:
    lockstep, overlapped_engine = gpu_plan(qwen).engine, gpu_plan(qwen, is_overlapped=True).engine
    assert (lockstep.dtype, lockstep.async_scheduling) == ("bfloat16", True)
    assert not overlapped_engine.async_scheduling
    finishing = gpu_plan(qwen, "inference_model.update=wait", is_overlapped=True).engine
    assert finishing.async_scheduling
    assert (lockstep.max_num_seqs, lockstep.max_num_batched_tokens) == (512, 8192)
    cpu = make_plan(config_of("grpo_quickstart", "inference_model.backend=vllm"), False, machine(0)).engine
    assert (cpu.dtype, cpu.async_scheduling) == ("float32", False)
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (256, None)


def test_weights_without_native_transfer_are_sent_through_memory(qwen: str) -> None:
    assert gpu_plan(qwen).transport == "nccl"
    adapter = ("train_model.lora.enabled=true", "inference_model.lora=adapter")
    assert gpu_plan(qwen, *adapter).transport == "shared_memory"
    assert gpu_plan(qwen, "inference_model.backend=transformers").transport == "shared_memory"
    assert gpu_plan(qwen, gpus=1).transport == "in_process"
    ranks = ("train_model.num_devices=2",)
    assert gpu_plan(qwen, *ranks, gpus=4).transport == "nccl"
    assert gpu_plan(qwen, *ranks, "train_model.offload=all", gpus=4).transport == "shared_memory"


def test_an_engine_in_the_learners_process_is_on_the_first_gpu_as_vllm_takes_it(qwen: str) -> None:
    by_hand = ("train_model.devices=[1]", "inference_model.devices=[1]", "inference_model.colocate=true")
    plan = gpu_plan(qwen, *by_hand)
    assert (plan.devices.in_process, plan.transport) == (False, "ipc")


def test_the_reference_is_on_the_training_gpu_in_host_memory_or_on_its_own_gpu(qwen: str) -> None:
    def home(*overrides: str, gpus: int, memory: float = 80.0) -> str:
        plan = make_plan(config_of("grpo_gsm8k", qwen, *overrides), False, machine(gpus, memory))
        return plan.reference.home

    assert home(gpus=3) == "own devices"
    assert home(gpus=2) == "training GPU"
    assert home(gpus=2, memory=60.0) == "host memory"
    assert home(gpus=1) == "host memory", "the engine needs the room"
    assert home("train_model.lora.enabled=true", gpus=2) == "base of the LoRA policy"
    assert home("policy.kl_coef=0", gpus=2) == "none"


@pytest.mark.parametrize(
    ("backend", "gpus", "vllm", "expected"),
    [
        ("auto", 2, None, "transformers"),
        ("auto", 2, "0.32.0", "vllm"),
        ("auto", 0, "0.32.0", "transformers"),
        ("vllm", 0, "0.32.0", "vllm"),
        ("transformers", 2, "0.32.0", "transformers"),
    ],
)
def test_the_backend_of_auto(qwen: str, backend: str, gpus: int, vllm: str | None, expected: str) -> None:
    config = config_of("grpo_gsm8k", qwen, "device=auto", f"inference_model.backend={backend}")
    assert make_plan(config, False, machine(gpus, vllm=vllm)).engine.backend == expected


def test_folders_and_names_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder has no config.json"):
        find_config_file(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        find_config_file("a/b/c/d")
    assert find_config_file("nobody/has-this-model") is None
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ConfigError, match="no vocab_size, num_hidden_layers, num_attention_heads"):
        read_shape(tmp_path / "config.json")


def test_a_reference_is_counted_at_its_location(qwen: str) -> None:
    """One rank holds a whole copy, always or only during scoring; several ranks hold shards."""

    def phases(*overrides: str, gpus: int, memory: float) -> tuple[str, dict[str, float]]:
        config = config_of("grpo_gsm8k", qwen, "model.dtype=float32", *overrides)
        plan = make_plan(config, False, machine(gpus, memory))
        return plan.reference.home, {phase.name: phase.bytes for phase in plan.phases}

    _, without = phases("policy.kl_coef=0", gpus=2, memory=80.0)
    home, staying = phases(gpus=2, memory=80.0)
    assert home == "training GPU"
    shape = read_shape(Path(qwen.partition("=")[2]) / "config.json")
    whole = 2 * (shape.parameters + shape.head_parameters)
    assert {name: staying[name] - without[name] for name in without} == pytest.approx(dict.fromkeys(without, whole))
    home, visiting = phases(gpus=1, memory=80.0)
    assert home == "host memory"
    assert visiting["score"] - without["score"] == pytest.approx(whole)
    assert visiting["optimize"] == without["optimize"]
    ranks = "train_model.num_devices=4"
    _, without = phases(ranks, "policy.kl_coef=0", gpus=5, memory=80.0)
    home, sharded = phases(ranks, gpus=5, memory=80.0)
    assert home == "learner ranks"
    assert sharded["optimize"] - without["optimize"] == pytest.approx(2 * shape.parameters / 4)


def test_a_padded_microbatch_attends_over_whole_rows(qwen: str) -> None:
    config = config_of("grpo_gsm8k", qwen, "train.packing=false", "train.gradient_accumulation_steps=16")
    shape = read_shape(Path(qwen.partition("=")[2]) / "config.json")
    prompt, response = config.env.max_prompt_tokens, config.inference_model.max_tokens
    rows, whole = longest_microbatch_rows(config, shape), prompt + response
    found = longest_microbatch(config, shape, on_cpu=False)
    assert (found.positions, found.keys, found.mask) == (rows * whole, rows * whole, rows * whole * whole)
    assert found.targets == rows * response


@pytest.mark.parametrize(("ranks", "place"), [(1, "GPU 0"), (2, "2 ranks, of the cluster")])
def test_the_learners_devices_on_a_cluster(ranks: int, place: str, qwen: str) -> None:
    cluster = configured_machine(MachineConfig(gpus=8, gpu_memory_gib=80, nodes=2), machine(0, vllm=None))
    config = config_of("grpo_gsm8k", qwen, f"train_model.num_devices={ranks}", "ray.address=auto")
    assert make_plan(config, True, cluster).devices.learner_devices == place
