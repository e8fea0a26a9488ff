"""Commands of TorchRL's GRPO README with our scripts, and the keys of its files.

Plans are for six GPUs of 80 GiB, as its allocations need. The learner, scorers and engines of an allocation are run by
the tests of each; here they are told apart by their devices alone.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.cli.error_messages import known_keys
from config.schema.config import Config
from tests.config.test_schema import message
from tests.punkt import OWN_PUNKT, use_punkt
from tests.scripts import ROOT, Ended, called
from tests.test_dry_runs import SCRIPTS, SHIPPED, Shipped, check_rows, rows_of, run_script, save_family, small
from torchgrpo.plan.machine import installed_vllm

MACHINE = ("run=plan", "plan.gpus=6", "plan.gpu_memory_gib=80")
COUNTED = ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
LISTED = ("train_model.devices=[0,1]", "ref_model.devices=[2,3]", "inference_model.devices=[4,5]")
ALLOCATIONS = {"counted": COUNTED, "listed": LISTED}
IFEVAL = "env.dataset=ifeval"
OPTIMIZER = ("optimizer.lr=2e-5", "optimizer.weight_decay=0.01")
COMMANDS = {
    "another dataset": (IFEVAL,),
    "another config": ("--config-name", "grpo_ifeval"),
    "optimizer": OPTIMIZER,
}
RATES = "optimizer.lr=1e-4,1e-5,1e-6"
GRID = ("optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1")
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")


def planned(folder: Path, script: str, *words: str) -> Ended:
    """The command with `run=plan`."""
    return called(script, *words, *MACHINE, f"hydra.run.dir={folder / 'run'}", f"hydra.sweep.dir={folder}")


def devices(output: str) -> dict[str, list[int]]:
    """GPUs of each line of a plan's section `devices`."""
    section = output.partition("\ndevices:\n")[2].partition("\nbatches:")[0]
    found: dict[str, list[int]] = {}
    for name, gpus in re.findall(
        r"^  (train_model|ref_model|engine \d+) .*?GPU (\d+(?:, ?\d+)*)", section, re.M
    ):
        found[name] = [int(gpu) for gpu in gpus.split(",")]
    return found


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model of the shipped family, without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    save_family(SHIPPED["gsm8k"], folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_allocation_uses_all_six_gpus(script: str, allocation: str, tmp_path: Path) -> None:
    command = planned(tmp_path, script, *ALLOCATIONS[allocation])
    assert command.returncode == 0, command.stderr
    found = devices(command.stdout)
    assert found.keys() == {"train_model", "ref_model", "engine 0", "engine 1"}
    assert (len(found["train_model"]), len(found["ref_model"])) == (2, 2)
    assert sorted(gpu for gpus in found.values() for gpu in gpus) == list(range(6)), "each once, none idle"
    if allocation == "listed":
        assert found == {"train_model": [0, 1], "ref_model": [2, 3], "engine 0": [4], "engine 1": [5]}
    assert "unused" not in command.stdout
    assert "keys that do nothing here" not in command.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_plans(script: str, command: str, tmp_path: Path) -> None:
    plan = planned(tmp_path, script, *COMMANDS[command])
    assert plan.returncode == 0, plan.stderr
    assert devices(plan.stdout)["train_model"] == [0]
    assert not list(tmp_path.iterdir()), "a plan leaves nothing"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("data", ["hub", "local"])
def test_a_base_model_plans(script: str, data: str, base_model: Path, tmp_path: Path) -> None:
    """Local rows are read as a run would read them, by the tokenizer."""
    rows = [] if data == "hub" else [f"env.data_files={rows_of('gsm8k')}"]
    plan = planned(tmp_path, script, f"model.name={base_model}", *rows)
    assert plan.returncode == 0, plan.stderr
    said = "has no chat template" in plan.stderr
    assert said == (data == "local")


@pytest.mark.parametrize(("words", "jobs"), [((RATES,), 3), (GRID, 4)], ids=["one key", "two keys"])
def test_a_sweep_plans_each_of_its_jobs(words: tuple[str, ...], jobs: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grpo.py", "--multirun", *words)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("\ndevices:\n") == jobs


@dataclass(frozen=True)
class DryRun:
    """A command as it is trained. shipped: the config that it changes."""

    shipped: Shipped
    words: tuple[str, ...] = ()


RUNS = {
    "another dataset": DryRun(
        Shipped("gsm8k", SHIPPED["ifeval"].answers, (IFEVAL, f"env.data_files={rows_of('ifeval')}"))
    ),
    "optimizer": DryRun(SHIPPED["gsm8k"], OPTIMIZER),
    "base model": DryRun(SHIPPED["gsm8k"]),
}
"""`--config-name grpo_ifeval` is in tests/test_dry_runs.py."""


@pytest.fixture(scope="module")
def folder_of(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = {"base model": base_model}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            save_family(RUNS[name].shipped, made[name])
        return made[name]

    return folder


@pytest.mark.long
@needs_vllm
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", RUNS)
def test_a_command_trains(
    name: str, script: str, folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command trains on the CPU, as the shipped configs do."""
    use_punkt(OWN_PUNKT, tmp_path / "nltk", monkeypatch)
    config = small(RUNS[name].shipped, f"model.name={folder_of(name)}", *RUNS[name].words)
    seen = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert seen.optimizer_steps == config.total_optimizer_steps == 4


OURS = "ours"
"""Of a key that is the same here."""
KEYS = {
    "mode": "the script is the mode: grpo.py is sync, grpo_async.py is async",
    "env.dataset": OURS,
    "env.num_envs": OURS,
    "env.repeats": OURS,
    "env.reasoning": OURS,
    "env.max_steps": OURS,
    "env.openenv.name": "env.dataset=module:Class",
    "env.openenv.env_kwargs.trust_remote_code": "env.dataset=module:Class",
    "env.openenv.max_steps": "env.dataset=module:Class",
    "model.name": OURS,
    "model.compile": "here it is train.compile",
    "train.sync": "grpo_async.py collects while it trains",
    "train.sync_iter": "grpo_async.py collects while it trains",
    "train.epochs": OURS,
    "train.buffer_size": "here it is train.buffer_groups",
    "train.weight_update_frequency": OURS,
    "train.steps_per_batch": "here it is train.dialog_turns_per_batch",
    "train.exp_name": "here it is logging.experiment_name",
    "train.mixed_precision": OURS,
    "train.total_dialog_turns": OURS,
    "train.packing": OURS,
    "train.dialog_turns_per_batch": OURS,
    "train.gradient_accumulation_steps": OURS,
    "train.checkpoint_frequency": OURS,
    "train.optim_batch_size": OURS,
    "train.kl_coef_in_loss": "here it is policy.kl_placement",
    "train.use_kl_to_ref": "here it is policy.kl_coef above 0",
    "train.kl_to_ref_coeff": "here it is policy.kl_coef",
    "train.kl_to_inference_coeff": "here it is policy.kl_inference_coef",
    "train.entropy_coeff": "here it is policy.entropy_coef",
    "train.logging_frequency": "every optimizer step is logged",
    "train.empty_replay_buffer": "what was trained on is never drawn again; train.epochs",
    "train_model.gradient_checkpointing": "here it is train.gradient_checkpointing",
    "train_model.num_devices": OURS,
    "train_model.devices": OURS,
    "train_model.lora.enabled": OURS,
    "train_model.lora.r": OURS,
    "train_model.lora.alpha": OURS,
    "train_model.lora.dropout": OURS,
    "train_model.quantization.enabled": "here it is train_model.lora.quantization=nf4",
    "train_model.attn_implementation": "here it is model.attn_implementation",
    "train_model.torch_dtype": "here it is model.dtype",
    "inference_model.backend": OURS,
    "inference_model.num_devices": OURS,
    "inference_model.devices": OURS,
    "inference_model.attn_implementation": "an engine chooses its own kernels",
    "inference_model.torch_dtype": "here it is inference_model.dtype",
    "inference_model.enable_fp32_lm_head": "policy.old_log_prob=trainer takes the learner's",
    "inference_model.enable_fp32_output": "policy.old_log_prob=trainer takes the learner's",
    "inference_model.disable_cuda_graph": "here it is inference_model.enforce_eager=true",
    "inference_model.disable_piecewise_cuda_graph": "here it is inference_model.enforce_eager=true",
    "inference_model.disable_overlap_schedule": "it is of SGLang, which is not here",
    "inference_model.gpu_memory_utilization": OURS,
    "inference_model.temperature": OURS,
    "inference_model.top_p": OURS,
    "inference_model.max_tokens": OURS,
    "inference_model.include_stop_str_in_output": "always so",
    "inference_model.enforce_eager": OURS,
    "inference_model.enable_prefix_caching": "always on",
    "inference_model.compile": "here it is inference_model.enforce_eager",
    "inference_model.verbose": "logging.progress",
    "ref_model.gradient_checkpointing": "the reference is not trained; ref_model.name",
    "ref_model.num_devices": OURS,
    "ref_model.devices": OURS,
    "ref_model.lora.enabled": "beside adapters the reference is their base unless ref_model.name",
    "ref_model.lora.r": "beside adapters the reference is their base unless ref_model.name",
    "ref_model.lora.alpha": "beside adapters the reference is their base unless ref_model.name",
    "ref_model.lora.dropout": "beside adapters the reference is their base unless ref_model.name",
    "ref_model.quantization.enabled": "ref_model.dtype=bfloat16 halves it",
    "ref_model.attn_implementation": "here it is model.attn_implementation",
    "ref_model.torch_dtype": "here it is ref_model.dtype",
    "optimizer.name": OURS,
    "optimizer.lr": OURS,
    "optimizer.eps": OURS,
    "optimizer.clip_grad_norm": OURS,
    "optimizer.weight_decay": OURS,
    "ray.init_config.num_cpus": "Ray is told no more than ray.address",
    "ray.init_config.num_gpus": "Ray is told no more than ray.address",
    "ray.init_config.runtime_env.working_dir": "Ray is told no more than ray.address",
    "ray.init_config._temp_dir": "Ray is told no more than ray.address",
    "ray.init_config._system_config.object_spilling_threshold": "Ray is told no more than ray.address",
    "ray.collector_config.num_cpus": "Ray is told no more than ray.address",
    "ray.train_handler_config.num_cpus": "Ray is told no more than ray.address",
    "ray.replay_buffer_config.num_cpus": "Ray is told no more than ray.address",
    "ray.replay_buffer_config.num_gpus": "Ray is told no more than ray.address",
    "logging.experiment_name": OURS,
    "logging.checkpoint_dir": "here it is hydra.run.dir",
    "logging.checkpoint_frequency": "here it is train.checkpoint_frequency",
    "policy.kl_coef": OURS,
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_its_files_is_ours_or_leads_to_it(key: str) -> None:
    """The message tells a missing section from a closed one and a single value."""
    assert key in known_keys(Config) if KEYS[key] == OURS else KEYS[key] in message(f"{key}=1")


def test_a_section_there_that_is_one_value_here() -> None:
    assert "inference_model.quantization: " in message("inference_model.quantization.enabled=false")


def test_the_page_has_every_key() -> None:
    """The page names every key, or the section that holds it."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    named = set(re.findall(r"`([\w.]+)(?:[=:][^`]*)?`", page))
    sections = {key for key in KEYS if any(key.startswith(f"{name}.") for name in named if "." in name)}
    lora = {
        f"ref_model.lora.{field}" for field in ("r", "alpha", "dropout")
    }  # beside `ref_model.lora.enabled`
    assert sorted(KEYS.keys() - named - sections - lora) == []
