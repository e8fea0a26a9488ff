"""Every shipped GPU config, run on the CPU by both scripts: the YAML as it is, a small random model of its family.

What differs from the YAML: the model's size, the device, the backend and dtype that a GPU would choose, local rows
for data, and how many prompts make a batch. Group sizes, limits, objective, reference, precision, checkpointing of
activations and evaluation sets are the file's own.
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
from tests.punkt import OWN_PUNKT, use_punkt
from tests.saved import saved_model
from tests.scripts import ROOT, SCHEDULE_OF, configured, rows
from tests.small_qwen import END, PADDING, save_qwen
from torchgrpo.batches.rollout import Rollout
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.plan.model_shape import KNOWN
from torchgrpo.plan.weight_bounds import BOUNDS
from torchgrpo.run.job import run_job
from torchgrpo.run.overlapped import Schedule
from torchgrpo.training.checkpoint import Saved, load_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")]
GPU_CONFIGS = [
    path
    for path in sorted((ROOT / "config").glob("grpo_*.yaml"))
    if "\ndevice: cpu\n" not in path.read_text()
]
DATA = ROOT / "tests" / "fixtures" / "data"
PROMPTS = 2
"""Of an iteration; each makes an optimizer step."""


@dataclass(frozen=True)
class Shipped:
    """A shipped config. answers: texts that its task accepts, or rewards in part; more: overrides."""

    name: str
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()


ROWS = "env.options.num_rows=8"  # of a generated task
SHIPPED = {
    shipped.name: shipped
    for shipped in (
        Shipped("gsm8k", ("#### 7", "#### 1,200")),
        Shipped("gsm8k_24gb", ("#### 7", "#### 1,200")),
        Shipped("countdown", ("<answer>1+2</answer>",), (ROWS,)),
        Shipped("math", ("\\boxed{3/2}", "\\boxed{2\\sqrt{2}}", "\\boxed{\\text{east}}")),
        Shipped("dapo", ("Answer: 34", "Answer: 2")),
        Shipped("code", ("```python\nprint(sum(map(int, input().split())))\n```",)),
        Shipped("ifeval", (" some words, here. And here.", "{}")),
        Shipped("reasoning_gym", (), (ROWS,)),
    )
}
SCRIPTS = {"grpo.py": grpo, "grpo_async.py": grpo_async}
ADAPTERS = {"grpo.py": "merge", "grpo_async.py": "adapter"}


def rows_of(dataset: str) -> str:
    """The rows that stand for a data set; none where the task generates its own."""
    file = DATA / f"{dataset}.jsonl"
    return str(file) if file.exists() else "null"


@cache
def as_shipped(name: str) -> Config:
    return configured(name=name)


def small(shipped: Shipped, *more: str) -> Config:
    """The shipped config with what a CPU needs in place of its own; rows of a microbatch stay as many."""
    name = f"grpo_{shipped.name}"
    own = as_shipped(name)
    batch = own.env.repeats
    rows_at_a_time = min(batch, own.optim_batch_size // own.train.gradient_accumulation_steps)
    sets = [f"eval.sets.{key}.data_files={rows_of(chosen.dataset)}" for key, chosen in own.eval.sets.items()]
    return configured(
        "device=cpu",
        "train_model.num_devices=1",
        "train_model.num_nodes=1",
        "inference_model.backend=vllm",
        "inference_model.num_devices=1",
        "inference_model.tensor_parallel_size=1",
        "inference_model.dtype=bfloat16",
        "inference_model.max_num_seqs=32",
        f"env.data_files={rows_of(own.env.dataset)}",
        f"env.num_envs={PROMPTS}",
        f"train.optim_batch_size={batch}",
        f"train.gradient_accumulation_steps={batch // rows_at_a_time}",
        f"train.total_dialog_turns={2 * PROMPTS * own.env.repeats}",
        *shipped.more,
        *sets,
        *more,
        name=name,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shipped], Path]:
    """Folders of the small models, by what they stand for; each is made once."""
    made: dict[str, Path] = {}

    def folder(shipped: Shipped) -> Path:
        if shipped.name not in made:
            made[shipped.name] = tmp_path_factory.mktemp(shipped.name)
            save_family(shipped, made[shipped.name])
        return made[shipped.name]

    return folder


def save_family(shipped: Shipped, folder: Path) -> None:
    """A small model with the head and the end token of the one that the config names, taught its task's answers."""
    config = small(shipped)
    examples = make_task(config.env).examples("train")
    answers = list(shipped.answers)
    if config.env.dataset == "reasoning_gym":
        answers = [f"<answer>{example.answer['answer']}</answer>" for example in examples]
    texts = [message["content"] for example in examples for message in example.messages]
    save_qwen(
        folder,
        tied=KNOWN[config.model.name]["tie_word_embeddings"],
        texts=texts,
        answers=answers,
        end=END if config.model.name.endswith("-Instruct") else PADDING,
    )


@dataclass
class Seen:
    """Parts of a run, noted while it went on and when its schedule had ended."""

    engine_dtype: str
    learner_dtype: torch.dtype
    optimizer_steps: int
    reference_scores: list[bool]


def run_script(config: Config, script: str, run_dir: Path) -> Seen:
    """Train, then load the newest checkpoint into the very parts that wrote it.

    Returns:
        reference_scores: for each optimizer step, whether its batch had finite ones.
    """
    seen: list[Seen] = []

    def train(working: Schedule) -> None:
        scores: list[bool] = []
        run, learn = working, working.learn

        def noted(rollout: Rollout) -> None:
            learn(rollout)
            scored = rollout.batch.ref_log_prob
            scores.append(scored is not None and bool(scored.isfinite().all()))

        run.learn = noted  # type: ignore[method-assign]
        SCRIPTS[script].train(working)
        run.begin(saved(run_dir), [])
        dtype = next(run.learner.worker.model.parameters()).dtype
        seen.append(Seen(run.plan.engine.dtype, dtype, run.learner.optimizer_steps, scores))

    assert run_job(config, run_dir, train, SCHEDULE_OF[SCRIPTS[script]]) == "finished"
    return seen[0]


@pytest.fixture(autouse=True)
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_punkt(OWN_PUNKT, tmp_path / "nltk", monkeypatch)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", [path.stem.removeprefix("grpo_") for path in GPU_CONFIGS])
def test_a_shipped_config(name: str, script: str, folders: Callable[[Shipped], Path], tmp_path: Path) -> None:
    shipped = SHIPPED[name]
    folder = folders(shipped)
    config = small(shipped, f"model.name={folder}")
    seen = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert (seen.engine_dtype, seen.learner_dtype) == ("bfloat16", getattr(torch, config.model.dtype))
    assert seen.optimizer_steps == config.total_optimizer_steps == 4
    assert seen.reference_scores == [config.policy.uses_reference] * 4
    assert all_moved(saved_model(saved(tmp_path).path), load_file(folder / "model.safetensors"))
    evaluated = {path.parent.name for path in tmp_path.glob("eval/*/iteration_*.jsonl")}
    assert evaluated == set(config.eval.sets)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_shipped_config_with_an_adapter(
    script: str, folders: Callable[[Shipped], Path], tmp_path: Path
) -> None:
    """Merged into full weights on its way to the engine, and as it is."""
    shipped = SHIPPED["gsm8k"]
    way = f"inference_model.lora={ADAPTERS[script]}"
    config = small(shipped, f"model.name={folders(shipped)}", "train_model.lora.enabled=true", way)
    seen = run_script(config, script, tmp_path)
    check_rows(script, tmp_path)
    assert seen.reference_scores == [True] * 4, "the base of the policy"
    assert all_moved(saved_model(saved(tmp_path).path), {})


def all_moved(trained: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> bool:
    """Every weight is another one; of adapters the half that begins at zero."""
    halves = [weight.any().item() for key, weight in trained.items() if "lora_B" in key]
    if halves:
        return all(halves)
    return bool(before) and all(
        not torch.equal(trained[key].float(), weight.float()) for key, weight in before.items()
    )


def saved(run_dir: Path) -> Saved:
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    return Saved(newest, load_checkpoint(newest))


def check_rows(script: str, run_dir: Path) -> None:
    """One row for each optimizer step, finite; weights that arrived; a reference where the objective has one."""
    metrics = [row for row in rows(run_dir) if "grad_norm" in row]
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
