"""`run=plan`: arithmetic, estimates and errors, without torch and without a device."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from config.cli.composition import to_config
from config.run_folder.checkpoints import checkpoint_path
from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.plan import MachineConfig
from tests.composed import composed
from torchgrpo.plan.machine import Machine, imagined_machine
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.memory import engine_weights, kv_bytes_per_sequence, train_phases
from torchgrpo.plan.microbatches import microbatch, microbatch_tokens, rows_at_a_time
from torchgrpo.plan.model_shape import GIB, find_file, kv_cache_bytes, read_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.plan_text import idle_keys, report
from torchgrpo.plan.problems import check, problems

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
    return to_config(composed(name, *overrides))


def machine(
    gpus: int, gpu_memory_gib: float | None = None, vllm: str | None = "0.32.0", **other: Any
) -> Machine:
    """A machine of known size, whatever this one has."""
    size = {"host_memory_gib": 64.0, "disk_gib": 1024.0} | other
    return Machine(
        gpus, gpu_memory_gib if gpus else None, vllm=vllm, gpu_ids=tuple(map(str, range(gpus))), **size
    )


def text_of(plan: Plan) -> str:
    return report(plan, problems(plan))


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return f"model.name={tmp_path}"


def gpu_plan(*overrides: str, gpus: int = 2, overlapped: bool = False) -> Plan:
    return make_plan(config_of("grpo_gsm8k", *overrides), overlapped, machine(gpus))


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
    path = find_file(str(folder))
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
    assert (
        f"1 GiB holds {GIB / kv_bytes_per_sequence(plan.config, plan.shape, 'bfloat16'):.1f} sequences"
        in text
    )


def test_the_quickstarts_model_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "1.0 million parameters" in text_of(
        make_plan(config_of("grpo_quickstart"), False, machine(0, vllm=None))
    )


def test_a_model_that_is_not_here_yet_still_gets_its_plan() -> None:
    text = text_of(gpu_plan("model.name=nobody/has-this-model"))
    assert "unknown: config.json of nobody/has-this-model is not on this machine yet" in text
    assert "32 prompts x 16 completions" in text


def test_the_knobs_that_are_named_do_change_the_estimate(qwen: str) -> None:
    usual = gpu_plan(qwen)
    assert usual.shape is not None

    def activations(*overrides: str) -> float:
        config = gpu_plan(qwen, *overrides).config
        assert usual.shape is not None
        optimize = train_phases(config, usual.shape, on_cpu=False)[1]
        return next(use.bytes for use in optimize.uses if use.what.startswith("activations"))

    assert activations("train.gradient_accumulation_steps=4") == 2 * activations()
    assert activations("train.gradient_checkpointing=false", "train.packing=false") > 10 * activations()
    assert activations("inference_model.max_tokens=512") < activations()
    shared = gpu_plan(qwen, "train.gradient_checkpointing=false").config
    assert microbatch_tokens(shared, usual.shape) == 512 + 16 * 1024
    lora = gpu_plan(qwen, "train_model.lora.enabled=true")
    assert peak(lora) < 0.5 * peak(usual)
    split = ["inference_model.num_devices=2", "inference_model.tensor_parallel_size=2"]
    halved = engine_weights(gpu_plan(qwen, *split, gpus=4).config, usual.shape, "bfloat16", on_cpu=False)
    assert 2 * halved == engine_weights(usual.config, usual.shape, "bfloat16", on_cpu=False)


def peak(plan: Plan) -> float:
    assert plan.shape is not None
    phases = train_phases(plan.config, plan.shape, on_cpu=False)
    return max(phase.bytes for phase in phases)


def impossible(match: str, *overrides: str, name: str = "grpo_gsm8k", gpus: int = 2, **how: Any) -> None:
    overlapped = how.pop("overlapped", False)
    with pytest.raises(ConfigError, match=match):
        check(make_plan(config_of(name, *overrides), overlapped, machine(gpus, **how)))


def test_plans_that_cannot_work(qwen: str) -> None:
    impossible("device=cuda: this machine has no NVIDIA GPU", qwen, gpus=0)
    impossible("vLLM is not installed", qwen, "inference_model.backend=vllm", vllm=None)
    impossible("has 32768 positions", qwen, "inference_model.max_tokens=40000")
    split = ["inference_model.num_devices=3", "inference_model.tensor_parallel_size=3"]
    impossible("=3 does not divide the 16 attention heads", qwen, *split, gpus=4)
    impossible("needs inference_model.backend=vllm", qwen, "inference_model.backend=transformers",
               "inference_model.num_devices=2", "inference_model.tensor_parallel_size=2", gpus=4)  # fmt: skip
    impossible("train_model.lora.enabled=false: there is none", qwen, "inference_model.lora=adapter")
    small = ("train_model.lora.enabled=true", "train_model.lora.quantization=nf4")
    impossible(r"nf4 needs bitsandbytes: pip install -e '\.\[qlora\]' in the project's folder", qwen, *small)
    impossible("cannot give its memory back", qwen, "inference_model.backend=transformers", gpus=1)
    impossible("both at once", qwen, gpus=1, overlapped=True)
    impossible("does not hold one sequence of 1536 tokens", qwen, "inference_model.kv_cache_gib=0.01")


def test_too_little_memory_names_the_largest_part(qwen: str) -> None:
    impossible(
        r"a GPU has 24.00 GiB, .* the largest part of phase optimize is optimizer state",
        qwen,
        gpu_memory_gib=24,
    )
    large = make_plan(config_of("grpo_gsm8k", qwen), False, machine(2, 141.0))
    assert not problems(large)
    assert "full sequences; at most 512 run" in text_of(large)
    cpu = ["device=cpu", "inference_model.max_tokens=16384", "train.gradient_checkpointing=false"]
    impossible(r"this machine's memory is 64.00 GiB.* activations of", qwen, *cpu)


def test_too_little_disk(qwen: str) -> None:
    alone = "train.export=false"
    impossible("checkpoints would take 6.*lower train.keep_checkpoints, or", qwen, alone, disk_gib=1.0)
    impossible("would take .* with the models beside them.*train.export=false", qwen, disk_gib=1.0)


def test_checkpoints_that_are_there_need_no_more_room(qwen: str, tmp_path: Path) -> None:
    """As when a run goes on in its folder; the file is sparse."""
    config = config_of("grpo_gsm8k", qwen, "train.export=false")
    plan = make_plan(config, False, machine(2, disk_gib=40.0), tmp_path)
    with pytest.raises(ConfigError, match="checkpoints would take"):
        check(plan)
    folder = checkpoint_path(tmp_path, 1) / "learner"
    folder.mkdir(parents=True)
    with (folder / "__0_0.distcp").open("wb") as file:
        file.truncate(35 * GIB)
    check(plan)


def test_all_problems_are_told_at_once(qwen: str) -> None:
    plan = make_plan(
        config_of("grpo_gsm8k", qwen, "inference_model.max_tokens=40000"),
        False,
        machine(2, 24.0, disk_gib=1.0),
    )
    with pytest.raises(ConfigError) as raised:
        check(plan)
    for line in ("has 32768 positions", "phase optimize needs", "checkpoints would take"):
        assert line in str(raised.value)
    marked = [line for line in text_of(plan).splitlines() if line.endswith("does not fit")]
    assert [line.split("  ")[1].strip() for line in marked][-1] == "checkpoints"
    assert len(marked) >= 4


def test_keys_that_nothing_reads_are_listed() -> None:
    config = config_of(
        "grpo_quickstart",
        "inference_model.backend=transformers",
        "inference_model.gpu_memory_utilization=0.5",
        "inference_model.update=abort",
        "train.max_policy_age=3",
        "policy.kl_coef=0",
        "ref_model.num_devices=2",
    )
    listed = "\n".join(idle_keys(make_plan(config, False, machine(0))))
    for key in ("gpu_memory_utilization=0.5", "update=abort", "max_policy_age=3", "ref_model.num_devices=2"):
        assert key in listed
    assert "max_policy_age" not in "\n".join(idle_keys(make_plan(config, True, machine(0))))
    assert idle_keys(make_plan(config_of("grpo_quickstart"), False, machine(0))) == []


def test_a_machine_that_one_is_not_on(qwen: str) -> None:
    here = machine(0, vllm=None)
    wanted = config_of(
        "grpo_gsm8k", qwen, "run=plan", "plan.gpus=8", "plan.gpu_memory_gib=80", "plan.nodes=8"
    ).plan
    there = imagined_machine(wanted, here)
    assert (there.num_gpus, there.nodes, there.gpu_memory_gib, there.imagined) == (8, 8, 80.0, True)
    plan = make_plan(config_of("grpo_gsm8k", qwen), True, there)
    assert (plan.transport, plan.devices.on_cluster) == ("nccl", True)
    assert "62 of 64 GPU(s) are unused: inference_model.num_devices=63 generates on them too" in plan.notes
    assert imagined_machine(MachineConfig(), here) is here
    assert (there.host_memory_gib, there.disk_gib) == (None, None)
    two = imagined_machine(MachineConfig(gpus=2, disk_gib=9.0), here)
    assert (two.gpu_memory_gib, two.host_memory_gib, two.disk_gib) == (80.0, None, 9.0)
    here_with = imagined_machine(MachineConfig(disk_gib=9.0), here)
    assert (here_with.host_memory_gib, here_with.disk_gib) == (here.host_memory_gib, 9.0)
    with pytest.raises(ConfigError, match="gpu_memory_gib=80: there is no GPU that has it"):
        imagined_machine(MachineConfig(gpu_memory_gib=80.0), here)
    with pytest.raises(ConfigError, match="disk_gib=inf: must be a number above 0"):
        MachineConfig(disk_gib=math.inf)
    too_many = config_of("grpo_gsm8k", qwen, "inference_model.num_devices=64")
    with pytest.raises(ConfigError, match="65 GPUs are needed, and 8 nodes have 64"):
        check(make_plan(too_many, True, there))


def test_a_run_takes_no_machine_but_its_own() -> None:
    with pytest.raises(ConfigError, match=r"plan\.\* describes a machine to plan for, but run=train"):
        config_of("grpo_gsm8k", "plan.gpus=8")


def test_engines_of_half_precision_schedule_ahead_only_where_no_push_can_fall_between(qwen: str) -> None:
    lockstep, overlapped = gpu_plan(qwen).engine, gpu_plan(qwen, overlapped=True).engine
    assert (lockstep.dtype, lockstep.async_scheduling, overlapped.async_scheduling) == (
        "bfloat16",
        True,
        False,
    )
    finishing = gpu_plan(qwen, "inference_model.update=wait", overlapped=True).engine
    assert finishing.async_scheduling
    assert (lockstep.max_num_seqs, lockstep.max_num_batched_tokens) == (512, 8192)
    cpu = make_plan(config_of("grpo_quickstart", "inference_model.backend=vllm"), False, machine(0)).engine
    assert (cpu.dtype, cpu.async_scheduling) == ("float32", False)
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (256, None)


def test_what_speaks_no_native_transfer_gets_its_weights_through_memory(qwen: str) -> None:
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


def test_the_reference_stays_visits_or_has_a_gpu(qwen: str) -> None:
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
    ("asked", "gpus", "vllm", "found"),
    [
        ("auto", 2, None, "transformers"),
        ("auto", 2, "0.32.0", "vllm"),
        ("auto", 0, "0.32.0", "transformers"),
        ("vllm", 0, "0.32.0", "vllm"),
        ("transformers", 2, "0.32.0", "transformers"),
    ],
)
def test_the_backend_that_auto_means(qwen: str, asked: str, gpus: int, vllm: str | None, found: str) -> None:
    config = config_of("grpo_gsm8k", qwen, "device=auto", f"inference_model.backend={asked}")
    assert make_plan(config, False, machine(gpus, vllm=vllm)).engine.backend == found


def test_folders_and_names_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json in it"):
        find_file(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        find_file("a/b/c/d")
    assert find_file("nobody/has-this-model") is None
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ConfigError, match="no vocab_size, num_hidden_layers, num_attention_heads"):
        read_shape(tmp_path / "config.json")


def test_a_reference_is_counted_where_it_is(qwen: str) -> None:
    """Whole on the training GPU of one rank, a visitor only while it scores; over several ranks in shards."""

    def phases(*overrides: str, gpus: int, memory: float) -> tuple[str, dict[str, float]]:
        plan = make_plan(config_of("grpo_gsm8k", qwen, *overrides), False, machine(gpus, memory))
        return plan.reference.home, {phase.name: phase.bytes for phase in plan.phases}

    _, without = phases("policy.kl_coef=0", gpus=2, memory=80.0)
    home, staying = phases(gpus=2, memory=80.0)
    assert home == "training GPU"
    shape = read_shape(Path(qwen.partition("=")[2]) / "config.json")
    whole = 2 * (shape.parameters + shape.head_parameters)
    assert {name: staying[name] - without[name] for name in without} == pytest.approx(
        dict.fromkeys(without, whole)
    )
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
    rows, whole = rows_at_a_time(config, shape), prompt + response
    found = microbatch(config, shape, on_cpu=False)
    assert (found.positions, found.keys, found.mask) == (rows * whole, rows * whole, rows * whole * whole)
    assert found.targets == rows * response


@pytest.mark.parametrize(("ranks", "place"), [(1, "GPU 0"), (2, "2 ranks, of the cluster")])
def test_where_the_learner_is_on_a_cluster(ranks: int, place: str, qwen: str) -> None:
    there = imagined_machine(MachineConfig(gpus=8, gpu_memory_gib=80, nodes=2), machine(0, vllm=None))
    config = config_of("grpo_gsm8k", qwen, f"train_model.num_devices={ranks}", "ray.address=auto")
    assert make_plan(config, True, there).devices.learner_place == place
