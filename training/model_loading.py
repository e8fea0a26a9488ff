"""Loading the policy and its tokenizer, with one clear message for everything that can be wrong about a name."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from config.errors import ConfigError
from config.models import ModelConfig
from envs.control_tokens import turn_end
from plan.model_shape import find_config, model_path
from training.quantization import dequantized, quantized

set_tqdm_hook(lambda bar, given, named: EmptyTqdm(*given, **named))
"""No bar for what only reads or writes files here; downloads keep theirs, which the hub's client draws."""


def _cannot_load(what: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.name={name}: {what} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0]}). "
        "Give a local folder in Hugging Face format (model.name=path/to/folder), or check the name and the "
        "connection to the hub"
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Raises ConfigError when there is none, or none with a chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(name))
    except (OSError, ValueError) as error:
        raise _cannot_load("its tokenizer", name, error) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.name={name}: its tokenizer has no chat template, so messages cannot be turned into prompts; "
            "take an instruct or chat model, or add chat_template.jinja to a local copy of it"
        )
    return tokenizer


def saved_eos_token_ids(name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The `end_tokens` of the files of a model, without loading its weights."""
    path = model_path(name)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a model without a generation config of its own
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    return end_tokens(generation, tokenizer)


def end_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the generation config's, the tokenizer's, and the chat template's."""
    configured = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    ends = (*ids, tokenizer.eos_token_id, turn_end(tokenizer))
    return sorted({token for token in ends if token is not None})


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """The policy as it starts, in `model.dtype`.

    Raises:
        ConfigError: it cannot be loaded, holds values that are not finite, or changes its logits after the head.
    """
    model = _load(AutoModelForCausalLM, config, getattr(torch, config.dtype), device)
    _check_finite(model, config.name)
    check_head(model)
    return model


def load_in_4bit(config: ModelConfig, device: torch.device, compute: torch.dtype) -> PreTrainedModel:
    """As `load_model`, every linear layer but the head in 4 bits: nf4, scales in 8 bits (arXiv 2305.14314, section 3).

    Layer by layer, as the weights come from the files; the rest is in `model.dtype`. compute: what layers multiply in.

    Raises:
        ConfigError: as `load_model`.
    """
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    dtype = getattr(torch, config.dtype)
    model = _load(AutoModelForCausalLM, config, dtype, device, quantization_config=settings)
    del model.config.quantization_config  # what is saved of this model has whole weights
    layers: Iterator[Any] = model.modules()
    for layer in layers:
        if any(quantized(parameter) for parameter in layer.parameters(recurse=False)):
            # The order of bytes that its fastest kernels on a CPU want, which they put weights in on first use, has no
            # backward pass.
            layer.support_avx512bf16_for_cpu = False
    _check_finite(model, config.name)
    check_head(model)
    return model


def load_frozen(config: ModelConfig, device: torch.device, autocast: torch.dtype | None) -> PreTrainedModel:
    """The same weights, to be scored with under `autocast` and never trained.

    Autocast rounds the weights of linear layers to its dtype each time they multiply. Here they are kept that way:
    the same numbers in half the memory. Embeddings, which may be the output head too, and norms keep float32.
    """
    dtype = getattr(torch, config.dtype)
    if autocast is None or dtype != torch.float32:
        return _load(AutoModelForCausalLM, config, dtype, device)
    bare = skeleton(config)
    architecture = type(bare)
    wide = {"_keep_in_fp32_modules_strict": outside_linear_layers(bare)}
    return _load(type(architecture.__name__, (architecture,), wide), config, autocast, device)


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """The model without its weights, from its config.json alone: layers and shapes, on the meta device."""
    files = AutoConfig.from_pretrained(model_path(config.name))
    return _on_meta(files, getattr(torch, config.dtype), config.attn_implementation)


def bare_model(config: ModelConfig) -> PreTrainedModel:
    """`load_model` without the weights: on the meta device, in `model.dtype`. Nothing is downloaded.

    Raises:
        ConfigError: config.json is neither on this machine nor known by the model's name.
    """
    raw = find_config(config.name)
    if raw is None:
        raise ConfigError(
            f"model.name={config.name}: its config.json is not on this machine, so its layers are not known here; load "
            "the model once, or give a local folder"
        )
    return _on_meta(AutoConfig.for_model(**raw), getattr(torch, config.dtype), config.attn_implementation)


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    return model


def outside_linear_layers(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that are not a linear layer's alone."""
    others = (module for module in model.modules() if not isinstance(module, nn.Linear))
    held = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def _load(
    loader: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device, **settings: Any
) -> PreTrainedModel:
    """Weights go from the file to their device one by one; no random ones are drawn before."""
    try:
        model: PreTrainedModel = loader.from_pretrained(
            model_path(config.name),
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            device_map={"": device},
            **settings,
        )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load("the model", config.name, error) from error
    return model


def _check_finite(model: PreTrainedModel, name: str) -> None:
    """Every log-prob would be NaN, and whatever looks at one first would be blamed."""
    wrong = [
        key
        for key, tensor in model.named_parameters()
        if not torch.isfinite(dequantized(tensor, model.get_submodule(key.rpartition(".")[0]))).all()
    ]
    if wrong:
        others = f" and {len(wrong) - 1} more of its tensors hold" if len(wrong) > 1 else " holds"
        raise ConfigError(
            f"model.name={name}: {wrong[0]}{others} values that are not finite (NaN or infinite): the files are "
            f"damaged, or {model.dtype} cannot hold what they were saved from; load or make them anew"
        )


def check_head(model: PreTrainedModel) -> None:
    """The loss applies the output head by itself, in chunks: the model's logits must be just that.

    Raises:
        ConfigError: the model changes its logits after the head (soft-capping, scaling).
    """
    head, device = model.get_output_embeddings(), model.device
    ids = torch.arange(4, device=device)[None]
    with torch.no_grad():
        logits = model(ids).logits.float()
        hidden = model.base_model(ids).last_hidden_state
        ours = torch.nn.functional.linear(hidden.to(head.weight.device), head.weight, head.bias).float()
    if not torch.allclose(logits, ours.to(logits.device), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"model.name={model.config.name_or_path}: {type(model).__name__} changes its logits after the output "
            "head (soft-capping or scaling), which the chunked loss does not reproduce; take another model"
        )
