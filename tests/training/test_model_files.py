"""Model files that do not fit their config.json are refused before anything starts."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import grpo
from config.schema.errors import ConfigError, RunError
from config.schema.models import LoraConfig, ModelConfig
from tests.architectures import save_tiny
from tests.script_runner import ROOT, compose_run_config, read_metrics
from torchgrpo.rollout.engines.token_sampling import append_token
from torchgrpo.rollout.weights.weight_check import WeightMismatch
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.training.base_weights import stream_weights
from torchgrpo.training.model_files import check_model_files
from torchgrpo.training.model_loading import load_frozen, load_in_4bit, load_model, load_tokenizer
from torchgrpo.training.model_writer import ModelWriter

CPU = torch.device("cpu")
QUICKSTART = ROOT / "torchgrpo" / "models" / "quickstart"
FIRST = "lm_head.weight"
TINY = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Tensors = dict[str, Tensor]


def model_of(folder: Path, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> ModelConfig:
    """Saves the quickstart's model with changed tensors."""
    shutil.copytree(QUICKSTART, folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return ModelConfig(str(folder))


def add_prefix(prefix: str) -> Callable[[Tensors], Tensors]:
    """Returns a function that adds a prefix to all names."""
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def drop_tensor(name: str) -> Callable[[Tensors], Tensors]:
    """Returns a function that drops one tensor."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


WRONG_FILES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a tensor is missing": (drop_tensor("model.norm.weight"), r"the files lack 1 tensor: model\.norm\.weight\. "),
    "an untied head is missing": (drop_tensor(FIRST), r"the files lack 1 tensor: lm_head\.weight\. "),
    "a tensor too many": (
        lambda tensors: tensors | {"model.more.weight": torch.zeros(2)},
        r"the model has no 1 tensor: model\.more\.weight\. ",
    ),
    "another shape": (
        lambda tensors: tensors | {FIRST: tensors[FIRST][:5]},
        r"shape differs for 1 tensor: lm_head\.weight \(lm_head\.weight is \[5, 192\] in the files and \[263, 192\]",
    ),
    "shards of ZeRO-3": (
        lambda tensors: {name: torch.zeros(0) for name in tensors},
        r"the shape differs for 21 tensors: .* and 18 more .*zero_to_fp32\.py",
    ),
    "compiled": (add_prefix("_orig_mod."), r"lack 21 tensors: .*no 21 tensors: .*`model\._orig_mod`"),
    "peft": (add_prefix("base_model.model."), r"Names begin with base_model\.model\.: .*merge_and_unload"),
    "parallel": (add_prefix("module."), r"Names begin with module\.: .*`model\.module`"),
}


@pytest.mark.parametrize(("change", "text"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_every_loader_refuses_wrong_files(change: Callable[[Tensors], Tensors], text: str, tmp_path: Path) -> None:
    config = model_of(tmp_path / "model", change)
    tokenizer = load_tokenizer(config)
    for load in (
        lambda: check_model_files(config, tokenizer),
        lambda: load_model(config, CPU),
        lambda: load_frozen(config, CPU, torch.bfloat16),
        lambda: ModelWriter(config, LoraConfig(enabled=True)),
    ):
        with pytest.raises(ConfigError, match=text) as raised:
            load()
        assert str(raised.value).startswith(f"model.name={config.name}: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_frozen_model_is_checked_as_the_policy(autocast: torch.dtype | None, tmp_path: Path) -> None:
    """A frozen head is applied in chunks too, and its NaN would appear elsewhere."""
    sizes = {name: value for name, value in TINY.items() if name != "max_position_embeddings"}
    scaled = AutoConfig.for_model("granite", **sizes, logits_scaling=8)
    AutoModelForCausalLM.from_config(scaled).save_pretrained(tmp_path / "scaled")
    damaged = model_of(tmp_path / "nan", lambda tensors: {**tensors, FIRST: torch.full_like(tensors[FIRST], math.nan)})
    for config, text in (
        (ModelConfig(str(tmp_path / "scaled")), "changes its logits after the output head"),
        (damaged, r"lm_head\.weight holds values that are not finite"),
    ):
        with pytest.raises(ConfigError, match=text):
            load_frozen(config, CPU, autocast)
    for dtype in ("float32", "bfloat16"):
        load_frozen(ModelConfig(str(QUICKSTART), dtype), CPU, autocast)


def test_a_base_in_4_bits_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install -e '.[qlora]' in the project's folder")
    config = model_of(tmp_path / "model", drop_tensor("model.norm.weight"))
    with pytest.raises(ConfigError, match="the files lack 1 tensor"):
        load_in_4bit(config, CPU, torch.float32)


def test_a_run_ends_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(tmp_path / "model", drop_tensor("model.norm.weight"))
    for job in ("run=train", "run=eval"):
        config = compose_run_config(job, f"model.name={model.name}", "eval.sets={test:{dataset:arithmetic,limit:2}}")
        with pytest.raises(ConfigError, match="the files lack 1 tensor"):
            run_job(config, tmp_path / job, grpo.train, LockstepRun)
    assert "MISSING" not in capsys.readouterr().err, "the library's own table"


def test_a_tied_head_may_be_absent(tmp_path: Path) -> None:
    save_tiny("gemma", tmp_path / "model")
    config = ModelConfig(str(tmp_path / "model"))
    assert FIRST not in load_file(tmp_path / "model" / "model.safetensors")
    check_model_files(config, load_tokenizer(config))
    load_model(config, CPU)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    config = model_of(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for load in (lambda: check_model_files(config, load_tokenizer(config)), lambda: load_model(config, CPU)):
        with pytest.raises(ConfigError, match=r"the model could not be loaded \(SafetensorError"):
            load()


@pytest.mark.parametrize(
    "quantization_config", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq", "bits": 4}]
)
def test_a_base_that_is_saved_quantized_is_one_line(quantization_config: dict[str, object], tmp_path: Path) -> None:
    config = model_of(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization_config}))
    with pytest.raises(
        ConfigError, match=rf"stored quantized \({quantization_config['quant_method']}\).*quantization=nf4"
    ):
        check_model_files(config, load_tokenizer(config))


def test_a_model_without_sdpa_names_the_attention_that_it_has(tmp_path: Path) -> None:
    save_tiny("gpt_oss", tmp_path / "model")
    config = ModelConfig(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM does not support SDPA attention: set .*=eager$"):
        check_model_files(config, load_tokenizer(config))
    config.attn_implementation = "eager"
    check_model_files(config, load_tokenizer(config))


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """The library would apply the adapter by itself."""
    config = model_of(tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="an adapter beside the weights"):
        check_model_files(config, load_tokenizer(config))


def test_one_file_of_weights_comes_before_an_index_that_was_left_behind(tmp_path: Path) -> None:
    config = model_of(tmp_path / "model")
    index = {"metadata": {}, "weight_map": {FIRST: "model-00001-of-00002.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({FIRST: torch.zeros(263, 192)}, tmp_path / "model" / "model-00001-of-00002.safetensors")
    check_model_files(config, load_tokenizer(config))
    read = stream_weights(config, [FIRST])
    assert read is not None and torch.equal(read(FIRST), load_model(config, CPU).get_output_embeddings().weight)


def test_an_unsupported_setting_of_a_model_gives_one_line(tmp_path: Path) -> None:
    save_tiny("jetmoe", tmp_path / "jetmoe")
    save_tiny("zamba2", tmp_path / "zamba2")
    for name, key, text in (
        ("jetmoe", "train.gradient_checkpointing=true", "train.gradient_checkpointing=full: JetMoe"),
        ("zamba2", "train_model.lora.enabled=true", "peft has no adapter for a layer of Zamba2ForCausalLM"),
    ):
        config = compose_run_config(key, f"model.name={tmp_path / name}")
        with pytest.raises(ConfigError, match=text):
            run_job(config, tmp_path / f"run of {name}", grpo.train, LockstepRun)


def test_an_evaluation_refuses_an_engine_that_decodes_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torchgrpo.rollout.engines.continuous_batching_decoder.append_token",
        lambda completion, token, log_prob, *rest: append_token(completion, token, log_prob - 0.1, *rest),
    )
    config = compose_run_config("run=eval", "eval.sets={test:{dataset:arithmetic,limit:2}}")
    with pytest.raises(WeightMismatch, match="completions decoded at the start"):
        run_job(config, tmp_path / "run", grpo.train, LockstepRun)


def save_multimodal(folder: Path) -> None:
    """Saves a model of text weights under a config.json with `text_config`, and an image tower."""
    text = TINY | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=262,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(QUICKSTART / file, folder)


def test_the_text_of_a_multimodal_model_trains_and_is_exported(tmp_path: Path) -> None:
    save_multimodal(tmp_path / "model")
    small = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=32", "inference_model.max_tokens=24")
    config = compose_run_config(*small, f"model.name={tmp_path / 'model'}", "optimizer.warmup_steps=0")
    with pytest.raises(RunError, match="nothing was learned"):  # a random model samples no right answer
        run_job(config, tmp_path / "run", grpo.train, LockstepRun)
    assert all(row["logprob_diff/max"] < 1e-4 for row in read_metrics(tmp_path / "run"))
    exported = ModelConfig(str(tmp_path / "run" / "model"))
    check_model_files(exported, load_tokenizer(exported))
    assert load_model(exported, CPU).config.text_config.vocab_size == 263


def more_tokens(folder: Path, *tokens: str, **special: str) -> PreTrainedTokenizerBase:
    """Saves the quickstart's tokenizer with more tokens."""
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(ModelConfig(name=str(folder)))


def test_a_tokenizer_that_ends_with_a_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    config = model_of(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"1 tokens beyond the 263 rows .*'<end>' is 263.*resize_token_embeddings"):
        check_model_files(config, more_tokens(tmp_path / "model", eos_token="<end>"))


def test_a_token_that_was_added_and_is_in_no_prompt_does_no_harm(tmp_path: Path) -> None:
    """Published tokenizers have image tokens that the text model lacks."""
    config = model_of(tmp_path / "model")
    check_model_files(config, more_tokens(tmp_path / "model", "<image>"))
    small = ("env.num_envs=2", "env.repeats=2", "train.total_dialog_turns=4", f"model.name={config.name}")
    assert run_job(compose_run_config(*small), tmp_path / "run", grpo.train, LockstepRun) == "finished"
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "prefill": "<image>"}\n')  # in a message it is text
    data = ("env.dataset=jsonl", f"env.data_files={file}")
    with pytest.raises(ConfigError, match=r"the prompt of row 0 has the token '<image>', whose id 263 is beyond"):
        run_job(compose_run_config(*small, *data), tmp_path / "other", grpo.train, LockstepRun)
