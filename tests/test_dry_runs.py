"""Dry runs of every shipped GPU config by both scripts, on the CPU.

The model is a small random one of the config's family. Device, backend, engine dtype, data (local rows) and the
number of prompts per batch are replaced. Group sizes, limits, objective, reference, precision, activation
checkpointing and evaluation sets are those of the YAML file.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import grpo
import grpo_async
from config.run_folder.checkpoints import newest_checkpoint
from config.schema.config import Config
from envs.task import make_task
from tests.checkpoint_helpers import saved_master_weights
from tests.plans import gpu_configs
from tests.punkt import OWN_PUNKT, use_punkt
from tests.script_runner import ROOT, SCHEDULE_CLASSES, compose_run_config, read_metrics
from tests.small_qwen import END, PADDING, save_qwen
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.known_models import KNOWN_MODELS
from torchgrpo.plan.log_prob_bounds import BOUNDS
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.overlapped_run import Schedule
from torchgrpo.training.checkpoint import Checkpoint, load_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")]
GPU_CONFIGS = sorted(gpu_configs())
DATA = ROOT / "tests" / "fixtures" / "data"
PROMPTS = 2
"""Number of prompts per iteration; each prompt makes one optimizer step."""


@dataclass(frozen=True)
class ShippedConfig:
    """Shipped config with the answers and overrides of its dry run.

    name: name of the file without `grpo_`. answers: texts that its task rewards, at least partly. overrides: changes
    of the config for the dry run.
    """

    name: str
    answers: tuple[str, ...]
    overrides: tuple[str, ...] = ()


NUM_ROWS = "env.options.num_rows=8"
"""Override of a generated task."""
SHIPPED_CONFIGS = {
    shipped_config.name: shipped_config
    for shipped_config in (
        ShippedConfig("gsm8k", ("#### 7", "#### 1,200")),
        ShippedConfig("gsm8k_24gb", ("#### 7", "#### 1,200")),
        ShippedConfig("countdown", ("<answer>1+2</answer>",), (NUM_ROWS,)),
        ShippedConfig("math", ("\\boxed{3/2}", "\\boxed{2\\sqrt{2}}", "\\boxed{\\text{east}}")),
        ShippedConfig("dapo", ("Answer: 34", "Answer: 2")),
        ShippedConfig("code", ("```python\nprint(sum(map(int, input().split())))\n```",)),
        ShippedConfig("ifeval", (" some words, here. And here.", "{}")),
        ShippedConfig("reasoning_gym", (), (NUM_ROWS,)),
    )
}
SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}
LORA_MODES = {"grpo.py": "merge", "grpo_async.py": "adapter"}


def data_file(dataset: str) -> str:
    """Returns the path of a dataset's local rows, or "null" for generated rows."""
    file = DATA / f"{dataset}.jsonl"
    return str(file) if file.exists() else "null"


@cache
def load_shipped_config(name: str) -> Config:
    return compose_run_config(name=name)


def small_config(shipped_config: ShippedConfig, *overrides: str) -> Config:
    """Returns the shipped config with settings for a CPU; microbatches keep their size."""
    name = f"grpo_{shipped_config.name}"
    original = load_shipped_config(name)
    batch_size = original.env.repeats
    microbatch_rows = min(batch_size, original.optim_batch_size // original.train.gradient_accumulation_steps)
    sets = [f"eval.sets.{key}.data_files={data_file(eval_set.dataset)}" for key, eval_set in original.eval.sets.items()]
    return compose_run_config(
        "device=cpu",
        "train_model.num_devices=1",
        "train_model.num_nodes=1",
        "inference_model.backend=vllm",
        "inference_model.num_devices=1",
        "inference_model.tensor_parallel_size=1",
        "inference_model.dtype=bfloat16",
        "inference_model.max_num_seqs=32",
        f"env.data_files={data_file(original.env.dataset)}",
        f"env.num_envs={PROMPTS}",
        f"train.optim_batch_size={batch_size}",
        f"train.gradient_accumulation_steps={batch_size // microbatch_rows}",
        f"train.total_dialog_turns={2 * PROMPTS * original.env.repeats}",
        *shipped_config.overrides,
        *sets,
        *overrides,
        name=name,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ShippedConfig], Path]:
    """Returns a function from a shipped config to the folder of its small model.

    Each model is written once.
    """
    model_folders: dict[str, Path] = {}

    def folder(shipped_config: ShippedConfig) -> Path:
        if shipped_config.name not in model_folders:
            model_folders[shipped_config.name] = tmp_path_factory.mktemp(shipped_config.name)
            save_small_model(shipped_config, model_folders[shipped_config.name])
        return model_folders[shipped_config.name]

    return folder


def save_small_model(shipped_config: ShippedConfig, folder: Path) -> None:
    """Saves a small model of the config's family that often samples answers of its task.

    The output head (tied or untied) and the end token are those of the named model.
    """
    config = small_config(shipped_config)
    examples = make_task(config.env).examples("train")
    answers = list(shipped_config.answers)
    if config.env.dataset == "reasoning_gym":
        answers = [f"<answer>{example.answer['answer']}</answer>" for example in examples]
    texts = [message["content"] for example in examples for message in example.messages]
    save_qwen(
        folder,
        tied=KNOWN_MODELS[config.model.name]["tie_word_embeddings"],
        texts=texts,
        answers=answers,
        end=END if config.model.name.endswith("-Instruct") else PADDING,
    )


@dataclass
class RunRecord:
    """Properties of a finished run.

    engine_dtype: dtype of the engine, by the plan. learner_dtype: dtype of the learner's parameters. optimizer_steps:
    their number. reference_scores: for each optimizer step, whether its batch had finite reference log-probs.
    """

    engine_dtype: str
    learner_dtype: torch.dtype
    optimizer_steps: int
    reference_scores: list[bool]


def run_script(config: Config, script: str, run_dir: Path) -> RunRecord:
    """Trains, then loads the newest checkpoint into the run that wrote it."""
    records: list[RunRecord] = []

    def train(schedule: Schedule) -> None:
        scores: list[bool] = []
        run, learn = schedule, schedule.learn

        def learn_and_record(rollout: Rollout) -> None:
            learn(rollout)
            ref_log_prob = rollout.batch.ref_log_prob
            scores.append(ref_log_prob is not None and bool(ref_log_prob.isfinite().all()))

        run.learn = learn_and_record  # type: ignore[method-assign]
        SCRIPTS[script].train(schedule)
        run.begin(load_newest_checkpoint(run_dir), [])
        dtype = next(run.learner.worker.model.parameters()).dtype
        records.append(RunRecord(run.plan.engine.dtype, dtype, run.learner.optimizer_steps, scores))

    assert run_job(config, run_dir, train, SCHEDULE_CLASSES[SCRIPTS[script]]) == "finished"
    return records[0]


@pytest.fixture(autouse=True)
def sentence_splitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_punkt(OWN_PUNKT, tmp_path / "nltk", monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", [name.removeprefix("grpo_") for name in GPU_CONFIGS])
def test_a_shipped_config(
    name: str, script: str, model_folder: Callable[[ShippedConfig], Path], tmp_path: Path
) -> None:
    shipped_config = SHIPPED_CONFIGS[name]
    folder = model_folder(shipped_config)
    config = small_config(shipped_config, f"model.name={folder}")
    record = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert (record.engine_dtype, record.learner_dtype) == ("bfloat16", getattr(torch, config.model.dtype))
    assert record.optimizer_steps == config.total_optimizer_steps == 4
    assert record.reference_scores == [config.policy.uses_reference] * 4
    assert all_weights_changed(
        saved_master_weights(load_newest_checkpoint(tmp_path).path), load_file(folder / "model.safetensors")
    )
    evaluated = {path.parent.name for path in tmp_path.glob("eval/*/iteration_*.jsonl")}
    assert evaluated == set(config.eval.sets)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_shipped_config_with_an_adapter(
    script: str, model_folder: Callable[[ShippedConfig], Path], tmp_path: Path
) -> None:
    """The engine gets the adapter merged into full weights, or the adapter itself."""
    shipped_config = SHIPPED_CONFIGS["gsm8k"]
    lora_mode = f"inference_model.lora={LORA_MODES[script]}"
    config = small_config(
        shipped_config, f"model.name={model_folder(shipped_config)}", "train_model.lora.enabled=true", lora_mode
    )
    record = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert record.reference_scores == [True] * 4, "the base of the policy is the reference"
    assert all_weights_changed(saved_master_weights(load_newest_checkpoint(tmp_path).path), {})


def all_weights_changed(weights: dict[str, torch.Tensor], initial_weights: dict[str, torch.Tensor]) -> bool:
    """Whether every weight differs from its initial value.

    For adapters, only the matrices B count, which are initially zero.
    """
    nonzero_matrices = [weight.any().item() for key, weight in weights.items() if "lora_B" in key]
    if nonzero_matrices:
        return all(nonzero_matrices)
    return bool(initial_weights) and all(
        not torch.equal(weights[key].float(), weight.float()) for key, weight in initial_weights.items()
    )


def load_newest_checkpoint(run_dir: Path) -> Checkpoint:
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    return Checkpoint(newest, load_checkpoint(newest))


def check_rows(script: str, run_dir: Path) -> None:
    """Checks the metrics rows of a run.

    Each optimizer step has one row of finite values. The weight check found the pushed weights in the engine.
    """
    metrics = [row for row in read_metrics(run_dir) if "grad_norm" in row]
    versions = {"grpo.py": [0, 0, 1, 1], "grpo_async.py": [0, 1, 2, 3]}[script]
    assert [row["policy_version"] for row in metrics] == versions
    differences = [row["weight_check/mean"] for row in metrics if "weight_check/mean" in row]
    assert differences and all(0 < difference < BOUNDS["bfloat16"].mean for difference in differences)
    for row in metrics:
        assert all(math.isfinite(value) for value in row.values())
        assert row["length/response_mean"] > 1
        assert row["reward/errors_total"] == 0
    assert any(row["reward/std"] > 0 for row in metrics), "nothing to learn"
    assert any(row["grad_norm"] > 0 for row in metrics)
    assert all(row["loss/nonfinite_steps"] == 0 for row in metrics)
