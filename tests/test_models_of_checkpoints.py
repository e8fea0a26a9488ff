"""The model beside a checkpoint is the policy of the run: to the bit in its files, to 1e-6 in its log-probs."""

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
from tests.scripts import configured, ran
from tests.tiny import resized_quickstart, tiny_mixture
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.training import model_writer, safetensors_writer

SMALL = (
    *("env.num_envs=2", "env.repeats=4", "train.total_dialog_turns=16", "optimizer.lr=3e-3"),
    "env.reward=tests.rewards:digits",
)
LORA = ("train_model.lora.enabled=true", "train_model.lora.r=4")
SEQUENCES = [[1, 40, 41, 42, 7, 9, 100, 5], [1, 200, 30, 12, 11]]
TWO = "train_model.num_devices=2"


def trained(run_dir: Path, *given: str) -> dict[str, Any]:
    """Train; the learner's tensors, as a push carries them, and its scores of SEQUENCES at the end."""
    found: dict[str, Any] = {}

    def train(working: Lockstep) -> None:
        grpo.train(working)
        learner = working.learner
        found["weights"] = {tensor.name: tensor.make().clone() for tensor in learner.publish()}
        found["scores"] = learner.score(SEQUENCES)

    run_job(configured(*SMALL, *given), run_dir, train, Lockstep)
    return found


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


def assert_is_the_policy(run_dir: Path, found: dict[str, Any]) -> None:
    files = load_file(run_dir / "model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert model.dtype == torch.float32
    tied = model.config.tie_word_embeddings
    assert found["weights"].keys() - files.keys() == ({"lm_head.weight"} if tied else set())
    for name, tensor in files.items():
        assert torch.equal(tensor, found["weights"][name]), name
    assert [pytest.approx(one, abs=1e-6) for one in found["scores"]] == scores(model)
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
    found = trained(tmp_path, *lora, f"model.name={base}")
    assert_is_the_policy(tmp_path, found)
    before = load_file(base / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.long
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_of_two_ranks(base: Path, lora: tuple[str, ...], tmp_path: Path) -> None:
    assert_is_the_policy(tmp_path, trained(tmp_path, *lora, TWO, f"model.name={base}"))


def test_the_adapter_alone_on_the_base(base: Path, tmp_path: Path) -> None:
    found = trained(tmp_path, *LORA, f"model.name={base}")
    adapter = tmp_path / "model" / "adapter"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert [pytest.approx(one, abs=1e-5) for one in found["scores"]] == scores(model)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["inference_mode"] and "q_proj" in settings["target_modules"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_on_bases_of_other_kinds(dtype: str, quantization: str, tmp_path: Path) -> None:
    """Rounded once, and from the base as 4 bits have it."""
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    given = (f"model.dtype={dtype}", f"train_model.lora.quantization={quantization}")
    found = trained(tmp_path, *LORA, *given, "inference_model.dtype=" + dtype)
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert files.keys() == found["weights"].keys()
    for name, tensor in files.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, found["weights"][name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == getattr(torch, dtype)


def test_half_precision_weights(tmp_path: Path) -> None:
    found = trained(tmp_path, "model.dtype=bfloat16", "inference_model.dtype=bfloat16")
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(tensor, found["weights"][name]) for name, tensor in files.items())


def assert_loads_as(folder: Path, found: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in found["weights"].items())
    assert [pytest.approx(one, abs=1e-6) for one in found["scores"]] == scores(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_have_the_names_that_they_had(kind: Any, tmp_path: Path) -> None:
    """Files hold each expert apart, layers hold all in one tensor."""
    tiny_mixture(tmp_path / "base", kind)
    found = trained(tmp_path / "run", f"model.name={tmp_path / 'base'}")
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {name: one.shape for name, one in after.items()} == {
        name: one.shape for name, one in before.items()
    }
    assert_loads_as(tmp_path / "run" / "model", found)


@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_several_files(lora: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base has several files, as large models have, and so has what is written."""
    base = tmp_path / "base"
    resized_quickstart(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="1MB")
    write = partial(safetensors_writer.write_safetensors, largest=1 << 20)
    monkeypatch.setattr(model_writer, "write_safetensors", write)
    found = trained(tmp_path / "run", *lora, f"model.name={base}")
    assert len(list((tmp_path / "run" / "model").glob("model-*-of-*.safetensors"))) > 1
    assert_loads_as(tmp_path / "run" / "model", found)


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "experts"])
def test_an_adapter_of_a_base_that_cannot_be_streamed(kind: str, tmp_path: Path) -> None:
    """Its model is not written while it trains, which would hold the base once more; `run=export` does it."""
    base = tmp_path / "base"
    if kind == "experts":
        tiny_mixture(base, "qwen3_moe")
    else:
        resized_quickstart(base)
        model = AutoModelForCausalLM.from_pretrained(base)
        (base / "model.safetensors").unlink()
        torch.save(model.state_dict(), base / kind)
    found = trained(tmp_path / "run", *LORA, f"model.name={base}")
    assert not (tmp_path / "run" / "model").exists()
    asked = ("run=export", f"checkpoint={tmp_path / 'run'}", f"to={tmp_path / 'new'}")
    run_job(configured(*asked), tmp_path / "own", grpo.train, Lockstep)
    assert_loads_as(tmp_path / "new", found)


@pytest.mark.long
@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
@pytest.mark.parametrize("lora", [(), LORA], ids=["full", "lora"])
def test_vllm_says_what_the_engine_of_the_run_said(lora: tuple[str, ...], tmp_path: Path) -> None:
    """Greedy, of the engine that was pushed to, and of one that was started from the folder; the adapter alone too."""
    path = tmp_path / "run"
    greedy = "eval.sets={sums:{dataset:arithmetic,n:1,temperature:0,limit:20}}"
    given = (*SMALL[:-1], *lora, greedy, "inference_model.backend=vllm")
    for settings, folder in (((), path), (("run=eval", f"model.name={path / 'model'}"), tmp_path / "eval")):
        process = ran("grpo.py", folder, *given, *settings)
        assert process.returncode == 0, process.output
    ours, theirs = path / "eval/sums/iteration_2.jsonl", tmp_path / "eval/eval/sums/iteration_0.jsonl"
    texts = [[json.loads(line)["completion"] for line in sorted(each.open())] for each in (ours, theirs)]
    assert len(texts[0]) == 20 and texts[0] == texts[1]
    before = path / "eval/sums/iteration_0.jsonl"
    assert [json.loads(line)["completion"] for line in sorted(before.open())] != texts[0]
