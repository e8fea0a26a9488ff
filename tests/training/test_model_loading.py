"""Loading of models and tokenizers, and the messages for wrong names."""

import shutil
from pathlib import Path

import pytest
import torch

from config.schema.errors import ConfigError
from config.schema.models import LoraConfig, ModelConfig
from tests.log_capture import LogCapture
from tests.tiny_models import tiny_llama
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training.adapters import add_lora, causal_model
from torchgrpo.training.model_loading import (
    check_output_head,
    end_tokens,
    load_frozen,
    load_model,
    load_tokenizer,
    saved_eos_token_ids,
)

CPU = torch.device("cpu")
QUICKSTART = "models/quickstart"


def test_a_relative_name_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(model_path(QUICKSTART)).is_dir()
    assert model_path("some/hub-name") == "some/hub-name"


def test_an_unknown_model_names_the_local_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"model\.name=nobody/nothing: its tokenizer .*local folder"):
        load_tokenizer(ModelConfig(name="nobody/nothing"))
    with pytest.raises(ConfigError, match=r"model\.name=nobody/nothing: the model .*local folder"):
        load_model(ModelConfig(name="nobody/nothing"), CPU)


def test_a_tokenizer_without_chat_template_takes_prompts_as_they_are(tmp_path: Path, log_capture: LogCapture) -> None:
    shutil.copytree(model_path(QUICKSTART), tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    assert not load_tokenizer(ModelConfig(name=str(tmp_path / "plain"))).chat_template
    assert "no chat template" in log_capture.text
    assert "model.chat_template=FILE" in log_capture.text


def test_every_end_token_counts() -> None:
    model = load_model(ModelConfig(name=QUICKSTART), CPU)
    tokenizer = load_tokenizer(ModelConfig(name=QUICKSTART))
    assert end_tokens(model.generation_config, tokenizer) == [2]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [2, 5]
    assert end_tokens(model.generation_config, tokenizer) == [2, 5]


def test_the_chat_templates_own_end_of_an_answer_ends_a_completion(tmp_path: Path) -> None:
    """A base model ends documents with its own token: `<|endoftext|>` besides `<|im_end|>`."""
    shutil.copytree(model_path(QUICKSTART), tmp_path / "base")
    template = tmp_path / "base" / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}\n<pad>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path / "base")))
    assert saved_eos_token_ids(str(tmp_path / "base"), tokenizer) == [tokenizer.pad_token_id, 2]
    template.write_text("{{ messages[-1].content }}!")
    assert saved_eos_token_ids(str(tmp_path / "base"), load_tokenizer(ModelConfig(name=str(tmp_path / "base")))) == [2]
    template.write_text("{% if messages[-1].role != 'user' %}{{ raise_exception('no answers') }}{% endif %}")
    assert saved_eos_token_ids(str(tmp_path / "base"), load_tokenizer(ModelConfig(name=str(tmp_path / "base")))) == [2]


def test_end_tokens_are_known_without_the_weights(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(name=QUICKSTART))
    assert saved_eos_token_ids(QUICKSTART, tokenizer) == [2]
    shutil.copytree(model_path(QUICKSTART), tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 2', '"eos_token_id": [2, 5]'))
    assert saved_eos_token_ids(str(tmp_path / "model"), tokenizer) == [2, 5]
    config.unlink()
    assert saved_eos_token_ids(str(tmp_path / "model"), tokenizer) == [2]


def test_loading_draws_no_random_numbers_and_shares_no_memory() -> None:
    before = torch.get_rng_state()
    models = [load_model(ModelConfig(name=QUICKSTART), CPU), load_frozen(ModelConfig(name=QUICKSTART), CPU, None)]
    assert torch.equal(before, torch.get_rng_state())
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_the_frozen_model_is_loaded_in_its_dtype() -> None:
    """Linear layers are loaded in the dtype of autocast; embeddings and norms are not rounded."""
    frozen = load_frozen(ModelConfig(name=QUICKSTART), CPU, torch.bfloat16)
    exact = dict(load_model(ModelConfig(name=QUICKSTART), CPU).named_parameters())
    dtypes = {name: parameter.dtype for name, parameter in frozen.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "proj" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if "norm" in name or "embed" in name} == {torch.float32}
    for name, parameter in frozen.named_parameters():
        assert torch.equal(parameter, exact[name].to(parameter.dtype))
    assert type(frozen).__name__ == "LlamaForCausalLM"
    half = load_frozen(ModelConfig(name=QUICKSTART, dtype="bfloat16"), CPU, torch.float16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_lora_trains_adapters_alone_and_starts_as_the_model() -> None:
    model = tiny_llama()
    ids = torch.arange(5, 11)[None]
    with torch.no_grad():
        expected = model(ids).logits
    lora_model = add_lora(model, LoraConfig(enabled=True, r=4))
    with torch.no_grad():
        torch.testing.assert_close(lora_model(ids).logits, expected)
    assert all("lora_" in name for name, p in lora_model.named_parameters() if p.requires_grad)
    assert causal_model(lora_model) is model


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = tiny_llama()
    forward = model.lm_head.forward
    check_output_head(model)
    model.lm_head.forward = lambda hidden_states: 5 * torch.tanh(forward(hidden_states) / 5)
    with pytest.raises(ConfigError, match="soft-capping, scaling"):
        check_output_head(model)
