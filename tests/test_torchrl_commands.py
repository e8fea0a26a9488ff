"""Commands and config keys of TorchRL's GRPO recipe, given to our scripts.

Plans are for six GPUs of 80 GiB, which the allocations of its README need. The tests of allocations read only the
devices of learner, scorers and engines from a plan.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.cli.error_messages import known_keys
from config.schema.config import Config
from tests.config.test_schema import quickstart_error_message
from tests.punkt import OWN_PUNKT, use_punkt
from tests.script_runner import ROOT, ScriptResult, call_script
from tests.test_dry_runs import (
    SCRIPTS,
    SHIPPED_CONFIGS,
    ShippedConfig,
    check_rows,
    data_file,
    run_script,
    save_small_model,
    small_config,
)
from torchgrpo.plan.machine import installed_vllm

MACHINE = ("run=plan", "machine.gpus=6", "machine.gpu_memory_gib=80")
DEVICE_COUNTS = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
DEVICE_LISTS = ("train_model.devices=[0,1]", "ref_model.devices=[2,3]", "inference_model.devices=[4,5]")
ALLOCATIONS = {"counts": DEVICE_COUNTS, "lists": DEVICE_LISTS}
IFEVAL = "env.dataset=ifeval"
OPTIMIZER = ("optimizer.lr=2e-5", "optimizer.weight_decay=0.01")
COMMANDS = {"another dataset": (IFEVAL,), "another config": ("--config-name", "grpo_ifeval"), "optimizer": OPTIMIZER}
LEARNING_RATES = "optimizer.lr=1e-4,1e-5,1e-6"
GRID = ("optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1")
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")


def run_plan(folder: Path, script: str, *words: str) -> ScriptResult:
    """Runs a command with `run=plan` on the hypothetical machine."""
    return call_script(script, *words, *MACHINE, f"hydra.run.dir={folder / 'run'}", f"hydra.sweep.dir={folder}")


def planned_devices(output: str) -> dict[str, list[int]]:
    """Returns the GPUs of each line in a plan's section `devices`."""
    section = output.partition("\ndevices:\n")[2].partition("\nbatches:")[0]
    gpus_of: dict[str, list[int]] = {}
    for name, gpus in re.findall(r"^  (train_model|ref_model|engine \d+) .*?GPU (\d+(?:, ?\d+)*)", section, re.M):
        gpus_of[name] = [int(gpu) for gpu in gpus.split(",")]
    return gpus_of


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a small random model without a chat template and returns its folder."""
    folder = tmp_path_factory.mktemp("base")
    save_small_model(SHIPPED_CONFIGS["gsm8k"], folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_allocation_uses_all_six_gpus(script: str, allocation: str, tmp_path: Path) -> None:
    command = run_plan(tmp_path, script, *ALLOCATIONS[allocation])
    assert command.returncode == 0, command.stderr
    gpus_of = planned_devices(command.stdout)
    assert gpus_of.keys() == {"train_model", "ref_model", "engine 0", "engine 1"}
    assert (len(gpus_of["train_model"]), len(gpus_of["ref_model"])) == (2, 2)
    assert sorted(gpu for gpus in gpus_of.values() for gpu in gpus) == list(range(6)), "each GPU once, none unused"
    if allocation == "lists":
        assert gpus_of == {"train_model": [0, 1], "ref_model": [2, 3], "engine 0": [4], "engine 1": [5]}
    assert "unused" not in command.stdout
    assert "keys that do nothing here" not in command.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_plans(script: str, command: str, tmp_path: Path) -> None:
    plan = run_plan(tmp_path, script, *COMMANDS[command])
    assert plan.returncode == 0, plan.stderr
    assert planned_devices(plan.stdout)["train_model"] == [0]
    assert not list(tmp_path.iterdir()), "a plan writes no file"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("data", ["hub", "local"])
def test_a_base_model_plans(script: str, data: str, base_model: Path, tmp_path: Path) -> None:
    """A plan tokenizes local rows, as a run does, which requires a chat template."""
    rows = [] if data == "hub" else [f"env.data_files={data_file('gsm8k')}"]
    plan = run_plan(tmp_path, script, f"model.name={base_model}", *rows)
    assert plan.returncode == 0, plan.stderr
    has_warning = "has no chat template" in plan.stderr
    assert has_warning == (data == "local")


@pytest.mark.parametrize(("words", "jobs"), [((LEARNING_RATES,), 3), (GRID, 4)], ids=["one key", "two keys"])
def test_a_sweep_plans_each_of_its_jobs(words: tuple[str, ...], jobs: int, tmp_path: Path) -> None:
    plan = run_plan(tmp_path, "grpo.py", "--multirun", *words)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("\ndevices:\n") == jobs


@dataclass(frozen=True)
class DryRun:
    """Dry run of a command: the shipped config and the overrides of the command."""

    shipped_config: ShippedConfig
    overrides: tuple[str, ...] = ()


DRY_RUNS = {
    "another dataset": DryRun(
        ShippedConfig("gsm8k", SHIPPED_CONFIGS["ifeval"].answers, (IFEVAL, f"env.data_files={data_file('ifeval')}"))
    ),
    "optimizer": DryRun(SHIPPED_CONFIGS["gsm8k"], OPTIMIZER),
    "base model": DryRun(SHIPPED_CONFIGS["gsm8k"]),
}
"""Dry runs by name; tests/test_dry_runs.py has that of `--config-name grpo_ifeval`."""


@pytest.fixture(scope="module")
def model_folder(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders = {"base model": base_model}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            save_small_model(DRY_RUNS[name].shipped_config, folders[name])
        return folders[name]

    return folder


@pytest.mark.long
@needs_vllm
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_command_trains(
    name: str, script: str, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command trains the small model on the CPU."""
    use_punkt(OWN_PUNKT, tmp_path / "nltk", monkeypatch)
    config = small_config(DRY_RUNS[name].shipped_config, f"model.name={model_folder(name)}", *DRY_RUNS[name].overrides)
    record = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert record.optimizer_steps == config.total_optimizer_steps == 4


OURS = "ours"
"""Marks a key that this project has too."""
KEYS = {
    "mode": "the script sets the mode: run grpo.py for sync, grpo_async.py for async",
    "env.dataset": OURS,
    "env.num_envs": OURS,
    "env.repeats": OURS,
    "env.reasoning": OURS,
    "env.max_steps": OURS,
    "env.openenv.name": "env.dataset=module:Class",
    "env.openenv.env_kwargs.trust_remote_code": "env.dataset=module:Class",
    "env.openenv.max_steps": "env.dataset=module:Class",
    "model.name": OURS,
    "model.compile": "use train.compile",
    "train.sync": "grpo_async.py collects completions during training",
    "train.sync_iter": "grpo_async.py collects completions during training",
    "train.epochs": OURS,
    "train.buffer_size": "use train.buffer_groups",
    "train.weight_update_frequency": OURS,
    "train.steps_per_batch": "use train.dialog_turns_per_batch",
    "train.exp_name": "use logging.experiment_name",
    "train.mixed_precision": OURS,
    "train.total_dialog_turns": OURS,
    "train.packing": OURS,
    "train.dialog_turns_per_batch": OURS,
    "train.gradient_accumulation_steps": OURS,
    "train.checkpoint_frequency": OURS,
    "train.optim_batch_size": OURS,
    "train.kl_coef_in_loss": "use policy.kl_placement",
    "train.use_kl_to_ref": "use policy.kl_coef above 0",
    "train.kl_to_ref_coeff": "use policy.kl_coef",
    "train.kl_to_inference_coeff": "use policy.kl_inference_coef",
    "train.entropy_coeff": "use policy.entropy_coef",
    "train.logging_frequency": "every optimizer step is logged",
    "train.empty_replay_buffer": "no batch is trained on again in a later iteration; train.epochs",
    "train_model.gradient_checkpointing": "use train.gradient_checkpointing",
    "train_model.num_devices": OURS,
    "train_model.devices": OURS,
    "train_model.lora.enabled": OURS,
    "train_model.lora.r": OURS,
    "train_model.lora.alpha": OURS,
    "train_model.lora.dropout": OURS,
    "train_model.quantization.enabled": "use train_model.lora.quantization=nf4",
    "train_model.attn_implementation": "use model.attn_implementation",
    "train_model.torch_dtype": "use model.dtype",
    "inference_model.backend": OURS,
    "inference_model.num_devices": OURS,
    "inference_model.devices": OURS,
    "inference_model.attn_implementation": "an engine chooses its own kernels",
    "inference_model.torch_dtype": "use inference_model.dtype",
    "inference_model.enable_fp32_lm_head": "policy.old_log_prob=trainer for the learner's",
    "inference_model.enable_fp32_output": "policy.old_log_prob=trainer for the learner's",
    "inference_model.disable_cuda_graph": "use inference_model.enforce_eager=true",
    "inference_model.disable_piecewise_cuda_graph": "use inference_model.enforce_eager=true",
    "inference_model.disable_overlap_schedule": "SGLang is not supported",
    "inference_model.gpu_memory_utilization": OURS,
    "inference_model.temperature": OURS,
    "inference_model.top_p": OURS,
    "inference_model.max_tokens": OURS,
    "inference_model.include_stop_str_in_output": "not needed: a completion keeps its end token or stop string",
    "inference_model.enforce_eager": OURS,
    "inference_model.enable_prefix_caching": "always on",
    "inference_model.compile": "use inference_model.enforce_eager",
    "inference_model.verbose": "logging.progress",
    "ref_model.gradient_checkpointing": "the reference is not trained; ref_model.name",
    "ref_model.num_devices": OURS,
    "ref_model.devices": OURS,
    "ref_model.lora.enabled": "with trained adapters the reference is their base, unless ref_model.name",
    "ref_model.lora.r": "with trained adapters the reference is their base, unless ref_model.name",
    "ref_model.lora.alpha": "with trained adapters the reference is their base, unless ref_model.name",
    "ref_model.lora.dropout": "with trained adapters the reference is their base, unless ref_model.name",
    "ref_model.quantization.enabled": "ref_model.dtype=bfloat16 to halve its memory",
    "ref_model.attn_implementation": "use model.attn_implementation",
    "ref_model.torch_dtype": "use ref_model.dtype",
    "optimizer.name": OURS,
    "optimizer.lr": OURS,
    "optimizer.eps": OURS,
    "optimizer.clip_grad_norm": OURS,
    "optimizer.weight_decay": OURS,
    "ray.init_config.num_cpus": "the settings of Ray are ray.address",
    "ray.init_config.num_gpus": "the settings of Ray are ray.address",
    "ray.init_config.runtime_env.working_dir": "the settings of Ray are ray.address",
    "ray.init_config._temp_dir": "the settings of Ray are ray.address",
    "ray.init_config._system_config.object_spilling_threshold": "the settings of Ray are ray.address",
    "ray.collector_config.num_cpus": "the settings of Ray are ray.address",
    "ray.train_handler_config.num_cpus": "the settings of Ray are ray.address",
    "ray.replay_buffer_config.num_cpus": "the settings of Ray are ray.address",
    "ray.replay_buffer_config.num_gpus": "the settings of Ray are ray.address",
    "logging.experiment_name": OURS,
    "logging.checkpoint_dir": "use hydra.run.dir",
    "logging.checkpoint_frequency": "use train.checkpoint_frequency",
    "policy.kl_coef": OURS,
}


@pytest.mark.parametrize("key", KEYS)
def test_a_torchrl_key_exists_or_its_error_names_ours(key: str) -> None:
    """The error message names the counterpart of a key that does not exist."""
    assert key in known_keys(Config) if KEYS[key] == OURS else KEYS[key] in quickstart_error_message(f"{key}=1")


def test_a_torchrl_section_that_is_one_value_of_ours() -> None:
    assert "inference_model.quantization: " in quickstart_error_message("inference_model.quantization.enabled=false")


def test_the_page_of_other_trainers_has_every_key() -> None:
    """docs/coming_from.md names every key or its section."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    named = set(re.findall(r"`([\w.]+)(?:[=:][^`]*)?`", page))
    sections = {key for key in KEYS if any(key.startswith(f"{name}.") for name in named if "." in name)}
    lora = {f"ref_model.lora.{field}" for field in ("r", "alpha", "dropout")}  # beside `ref_model.lora.enabled`
    assert sorted(KEYS.keys() - named - sections - lora) == []
