"""Loading the policy and its tokenizer, with one clear message for everything that can be wrong about a name."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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
from transformers.utils import logging as library_log
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from config.schema.config import Config
from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.control_tokens import turn_end
from torchgrpo.plan.model_shape import find_config, model_path
from torchgrpo.training.quantization import dequantized, quantized

log = logging.getLogger(__name__)
set_tqdm_hook(lambda bar, given, named: EmptyTqdm(*given, **named))
"""No bar for what only reads or writes files here; downloads keep theirs, which the hub's client draws."""


_LOADING_ERRORS = (
    *(OSError, ValueError, ImportError, KeyError, AttributeError, TypeError, RuntimeError),
    SafetensorError,
)
"""Raised by the library for files, configs and names that it cannot use."""
_PREFIXES = {
    "_orig_mod.": "a compiled model's `state_dict` was saved: save the model inside (`model._orig_mod`)",
    "base_model.model.": "peft's wrapper was saved: `merge_and_unload()` the adapter and save what that returns",
    "module.": "the wrapper of DataParallel or DDP was saved: save the model inside (`model.module`)",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved: gather the full state of the model inside and save that",
}
"""What tools put before the names of tensors, and what to save instead."""
_SHOWN = 3
NO_TEMPLATE = "none"
"""Value of `model.chat_template` for prompts without one."""


@contextmanager
def loading(what: str, name: str) -> Iterator[None]:
    """Turn what the library raises for `what` of `model.name` into a ConfigError with remedy."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except _LOADING_ERRORS as error:
        text = str(error).strip() or repr(error)
        if "scaled_dot_product_attention" in text:
            raise ConfigError(
                f"model.name={name}: {text.split()[0]} has no attention with sdpa: set "
                "model.attn_implementation=eager"
            ) from error
        remedy = (
            "Set model.attn_implementation=sdpa, or install that kernel"
            if "FlashAttention" in text or "flash_attn" in text
            else "Give a local folder in Hugging Face format (model.name=path/to/folder), or check the name and the "
            "connection to the hub"
        )
        raise ConfigError(
            f"model.name={name}: {what} could not be loaded ({type(error).__name__}: {text.splitlines()[0]}). {remedy}"
        ) from error


@contextmanager
def said_of_reference(config: Config) -> Iterator[None]:
    """Blame `ref_model.name` for files that it names, where an error would blame `model.name`."""
    try:
        yield
    except ConfigError as error:
        if config.ref_model.name is None:
            raise
        raise ConfigError(re.sub(r"\bmodel\.name=", "ref_model.name=", str(error))) from error


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a tokenizer with the chat template of the prompts, if any. Raises ConfigError."""
    tokenizer = load_saved_tokenizer(config)
    if config.chat_template == NO_TEMPLATE:
        tokenizer.chat_template = None
    elif not tokenizer.chat_template:
        log.warning(
            "model.name=%s: its tokenizer has no chat template, so a prompt is the text of its messages, as with "
            "model.chat_template=%s; a chat model needs its own (model.chat_template=FILE)",
            config.name,
            NO_TEMPLATE,
        )
    return tokenizer


def load_saved_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a tokenizer as an export saves it, with the file's template. Raises ConfigError."""
    with loading("its tokenizer", config.name):
        tokenizer = AutoTokenizer.from_pretrained(model_path(config.name), trust_remote_code=False)
    name = config.chat_template
    if name is None or name == NO_TEMPLATE:
        return tokenizer
    place, path = f"model.chat_template={name}", Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{place}: no such file (looked from {Path.cwd()}); give a file of Jinja, or {NO_TEMPLATE}"
        )
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except Exception as error:  # a template is a program, and raises what it likes
        raise ConfigError(f"{place}: it cannot render a message ({error}); mend the file") from error
    if "question" not in str(rendered):
        raise ConfigError(f"{place}: it leaves the message of the user out; mend the file")
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
    check_head(model)
    return model


def load_in_4bit(config: ModelConfig, device: torch.device, compute: torch.dtype) -> PreTrainedModel:
    """As `load_model`, every linear layer but the head in 4 bits: nf4, scales in 8 bits (arXiv 2305.14314, section 3).

    Layer by layer, as the weights come from the files; the rest is in `model.dtype`. compute: what layers multiply in.
    Raises as `load_model`.
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
    check_head(model)
    return model


def load_frozen(config: ModelConfig, device: torch.device, autocast: torch.dtype | None) -> PreTrainedModel:
    """The same weights, to be scored with under `autocast` and never trained.

    Autocast rounds the weights of linear layers to its dtype each time they multiply. Here they are kept that way:
    the same numbers in half the memory. Embeddings, which may be the output head too, and norms keep float32.
    Raises as `load_model`.
    """
    dtype = getattr(torch, config.dtype)
    loader: Any = AutoModelForCausalLM
    if autocast is not None and dtype == torch.float32:
        bare = skeleton(config)
        architecture = type(bare)
        others = (module for module in bare.modules() if not isinstance(module, nn.Linear))
        held = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        named = bare.named_parameters()
        wide = {"_keep_in_fp32_modules_strict": {name for name, one in named if id(one) in held}}
        dtype, loader = autocast, type(architecture.__name__, (architecture,), wide)
    model = _load(loader, config, dtype, device)
    # Its linear layers may be in half precision already, which needs autocast to compute at all.
    check_head(model, autocast)
    return model


def skeleton(config: ModelConfig) -> PreTrainedModel:
    """The model without its weights, from its config.json alone: layers and shapes, on the meta device."""
    files = AutoConfig.from_pretrained(model_path(config.name), trust_remote_code=False)
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
    with loading("the model", config.name):
        return _on_meta(AutoConfig.for_model(**raw), getattr(torch, config.dtype), config.attn_implementation)


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    return model


def _load(
    loader: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device, **settings: Any
) -> PreTrainedModel:
    """Load weights from files to their device one by one. Raises ConfigError for other tensors, and for values that are
    not finite: every log-prob would be NaN, and whatever looks at one first would be blamed."""
    with loading("the model", config.name), quiet_library():
        loaded = loader.from_pretrained(
            model_path(config.name),
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused there
            **settings,
        )
    model: PreTrainedModel = loaded[0]
    check_report(config.name, model, loaded[1])
    wrong = [
        key
        for key, tensor in model.named_parameters()
        if not torch.isfinite(dequantized(tensor, model.get_submodule(key.rpartition(".")[0]))).all()
    ]
    if wrong:
        others = f" and {len(wrong) - 1} more of its tensors hold" if len(wrong) > 1 else " holds"
        raise ConfigError(
            f"model.name={config.name}: {wrong[0]}{others} values that are not finite (NaN or infinite): the files are "
            f"damaged, or {model.dtype} cannot hold what they were saved from; load or make them anew"
        )
    return model


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library's table of tensors off the terminal, which `check_report` replaces."""
    level = library_log.get_verbosity()
    library_log.set_verbosity_error()
    try:
        yield
    finally:
        library_log.set_verbosity(level)


def check_report(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse files whose tensors are not the model's; only a tied head may be absent.

    report: the library's, of `output_loading_info`.

    Raises:
        ConfigError: tensors are missing, not the model's, or of another shape; with their names and number.
    """
    missing = sorted(report["missing_keys"])  # a tied head is not among them
    unexpected = sorted(report["unexpected_keys"])
    mismatched = sorted(report["mismatched_keys"])
    found = []
    if missing:
        found.append(f"the files lack {_named(missing)}")
    if unexpected:
        found.append(f"the model has no {_named(unexpected)}")
    if mismatched:
        tensor, saved, own = mismatched[0]
        shapes = f" ({tensor} is {list(saved)} in the files and {list(own)} in the model)"
        found.append(f"another shape has {_named([one[0] for one in mismatched])}{shapes}")
    found += [str(message).splitlines()[0] for message in report.get("error_msgs", ())]
    if not found:
        return
    prefix = next((each for each in _PREFIXES if any(key.startswith(each) for key in unexpected)), None)
    empty = any(0 in saved for _, saved, _ in mismatched)
    remedy = (
        f"Names begin with {prefix}: {_PREFIXES[prefix]}"
        if prefix
        else "Empty tensors are what ZeRO-3 saves of shards: gather them (DeepSpeed's zero_to_fp32.py) and save again"
        if empty
        else f"Weights and config.json of one and the same {type(model).__name__} are needed: save the model again"
    )
    raise ConfigError(f"model.name={name}: {'; '.join(found)}. {remedy}")


def _named(tensors: list[str]) -> str:
    """Their number, and the first names."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}: {', '.join(tensors[:_SHOWN])}{more}"


def check_head(model: PreTrainedModel, autocast: torch.dtype | None = None) -> None:
    """The loss applies the output head by itself, in chunks: the model's logits must be just that.

    autocast: that it computes under; None: in the dtype of its weights.

    Raises:
        ConfigError: the model does more after its last hidden state (soft-capping, scaling, another layer), or takes
            more than token ids.
    """
    ids = torch.arange(4, device=model.device)[None]
    why = f"model.name={model.config.name_or_path}: {type(model).__name__}"
    try:
        with torch.no_grad(), torch.autocast(model.device.type, autocast, enabled=autocast is not None):
            logits = model(ids).logits
            logits_dtype, logits = logits.dtype, logits.float()
            hidden = model.base_model(ids).last_hidden_state
            head: Any = model.get_output_embeddings()
            ours = nn.functional.linear(hidden.to(head.weight.device), head.weight, head.bias).float()
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        first = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"{why} is no language model whose logits are its output head's of its last hidden states "
            f"({type(error).__name__}: {first}); take another model"
        ) from error
    # Half precision rounds a kernel's sums otherwise; soft-capping shows in float32 however small the logits are.
    rounding = 1e-5 if logits_dtype == torch.float32 else 1e-2
    if (logits - ours.to(logits.device)).abs().max() > rounding * logits.abs().max():
        raise ConfigError(
            f"{why} changes its logits after the output head (soft-capping, scaling, a layer before it), which the "
            "chunked loss does not reproduce; take another model"
        )
