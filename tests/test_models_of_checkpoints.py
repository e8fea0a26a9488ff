"""Tests that the model beside a checkpoint is the policy of the run.

Files are equal to the bit, log-probs to 1e-6.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import grpo
from tests.script_runner import compose_run_config, run_script
from tests.tiny_models import resized_quickstart, tiny_mixture
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training import model_writer, safetensors_writer

SMALL = (
    *("env.num_envs=2", "env.repeats=4", "train.total_dialog_turns=16", "optimizer.lr=3e-3"),
    "env.reward=tests.rewards:digits",
)
LORA = ("train_model.lora.enabled=true", "train_model.lora.r=4")
SEQUENCES = [[1, 40, 41, 42, 7, 9, 100, 5], [1, 200, 30, 12, 11]]
TWO_RANKS = "train_model.num_devices=2"


def train_and_score(run_dir: Path, *overrides: str) -> dict[str, Any]:
    """Trains, and returns the learner's pushed tensors and its log-probs of SEQUENCES."""
    expected: dict[str, Any] = {}

    def train(working: LockstepRun) -> None:
        grpo.train(working)
        learner = working.learner
        expected["weights"] = {tensor.name: tensor.make().clone() for tensor in learner.publish()}
        expected["scores"] = learner.score(SEQUENCES)

    run_job(compose_run_config(*SMALL, *overrides), run_dir, train, LockstepRun)
    return expected


def scores(model: Any) -> list[list[float]]:
    with torch.no_grad():
        return [
            model(torch.tensor([one]))
            .logits[0, :-1]
            .log_softmax(-1)
            .gather(1, torch.tensor(one[1:])[:, None])[:, 0]
            .tolist()
            for one in SEQUENCES
        ]


def assert_is_the_policy(run_dir: Path, expected: dict[str, Any]) -> None:
    files = load_file(run_dir / "model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert model.dtype == torch.float32
    tied = model.config.tie_word_embeddings
    assert expected["weights"].keys() - files.keys() == ({"lm_head.weight"} if tied else set())
    for name, tensor in files.items():
        assert torch.equal(tensor, expected["weights"][name]), name
    assert [pytest.approx(one, abs=1e-6) for one in expected["scores"]] == scores(model)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False)
    ends = GenerationConfig.from_pretrained(run_dir / "model").eos_token_id
    assert ends == tokenizer.eos_token_id


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base") / "model"
    resized_quickstart(folder, tie_word_embeddings=request.param)
    return folder


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_of_one_process(base: Path, lora: tuple[str, ...], tmp_path: Path) -> None:
    expected = train_and_score(tmp_path, *lora, f"model.name={base}")
    assert_is_the_policy(tmp_path, expected)
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.long
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_of_two_ranks(base: Path, lora: tuple[str, ...], tmp_path: Path) -> None:
    assert_is_the_policy(tmp_path, train_and_score(tmp_path, *lora, TWO_RANKS, f"model.name={base}"))


def test_the_adapter_alone_on_the_base(base: Path, tmp_path: Path) -> None:
    expected = train_and_score(tmp_path, *LORA, f"model.name={base}")
    adapter = tmp_path / "model" / "adapter"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert [pytest.approx(one, abs=1e-5) for one in expected["scores"]] == scores(model)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["inference_mode"] and "q_proj" in settings["target_modules"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_on_bases_of_other_kinds(dtype: str, quantization: str, tmp_path: Path) -> None:
    """Rounded once, and from the base as 4 bits have it."""
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    overrides = (f"model.dtype={dtype}", f"train_model.lora.quantization={quantization}")
    expected = train_and_score(tmp_path, *LORA, *overrides, "inference_model.dtype=" + dtype)
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert files.keys() == expected["weights"].keys()
    for name, tensor in files.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected["weights"][name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == getattr(torch, dtype)


def test_half_precision_weights(tmp_path: Path) -> None:
    expected = train_and_score(tmp_path, "model.dtype=bfloat16", "inference_model.dtype=bfloat16")
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(tensor, expected["weights"][name]) for name, tensor in files.items())


def assert_loads_as(folder: Path, expected: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected["weights"].items())
    assert [pytest.approx(one, abs=1e-6) for one in expected["scores"]] == scores(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_have_the_names_that_they_had(kind: Any, tmp_path: Path) -> None:
    """Files hold one tensor per expert, layers one tensor of all experts."""
    tiny_mixture(tmp_path / "base", kind)
    expected = train_and_score(tmp_path / "run", f"model.name={tmp_path / 'base'}")
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
    assert_loads_as(tmp_path / "run" / "model", expected)


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_several_files(lora: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base has several files, as large models have, and so has what is written."""
    base = tmp_path / "base"
    resized_quickstart(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="1MB")
    write = partial(safetensors_writer.write_safetensors, max_file_bytes=1 << 20)
    monkeypatch.setattr(model_writer, "write_safetensors", write)
    expected = train_and_score(tmp_path / "run", *lora, f"model.name={base}")
    assert len(list((tmp_path / "run" / "model").glob("model-*-of-*.safetensors"))) > 1
    assert_loads_as(tmp_path / "run" / "model", expected)


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "experts"])
def test_an_adapter_of_a_base_that_cannot_be_streamed(kind: str, tmp_path: Path) -> None:
    """The model of such a base is not written during training, but by `run=export`.

    Writing it during training would hold the base in memory a second time.
    """
    base = tmp_path / "base"
    if kind == "experts":
        tiny_mixture(base, "qwen3_moe")
    else:
        resized_quickstart(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        (base / "model.safetensors").unlink()
        torch.save(model.state_dict(), base / kind)
    expected = train_and_score(tmp_path / "run", *LORA, f"model.name={base}")
    assert not (tmp_path / "run" / "model").exists()
    overrides = ("run=export", f"export.checkpoint={tmp_path / 'run'}", f"export.to={tmp_path / 'new'}")
    run_job(compose_run_config(*overrides), tmp_path / "own", grpo.train, LockstepRun)
    assert_loads_as(tmp_path / "new", expected)


@pytest.mark.long
@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_vllm_completions_of_the_model_equal_those_of_the_run(lora: tuple[str, ...], tmp_path: Path) -> None:
    """Greedy completions agree between pushed weights and an engine started from the model."""
    path = tmp_path / "run"
    greedy = "eval.sets={sums:{dataset:arithmetic,n:1,temperature:0,limit:20}}"
    overrides = (*SMALL[:-1], *lora, greedy, "inference_model.backend=vllm")
    for settings, folder in (((), path), (("run=eval", f"model.name={path / 'model'}"), tmp_path / "eval")):
        process = run_script("grpo.py", folder, *overrides, *settings)
        assert process.returncode == 0, process.output
    ours, theirs = path / "eval/sums/iteration_2.jsonl", tmp_path / "eval/eval/sums/iteration_0.jsonl"
    texts = [[json.loads(line)["completion"] for line in sorted(each.open())] for each in (ours, theirs)]
    assert len(texts[0]) == 20 and texts[0] == texts[1]
    before = path / "eval/sums/iteration_0.jsonl"
    assert [json.loads(line)["completion"] for line in sorted(before.open())] != texts[0]
