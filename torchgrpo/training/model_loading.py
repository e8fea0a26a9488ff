"""Loads models and tokenizers, builds models without weights, and turns loading errors into ConfigErrors."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
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
from envs.control_tokens import turn_end_token
from envs.template_arguments import set_template_arguments
from torchgrpo.plan.model_shape import find_model_config, model_path
from torchgrpo.training.quantization import dequantize_weight, is_quantized

log = logging.getLogger(__name__)
# No progress bar for reading and writing files; the bars of downloads belong to the client of the hub.
set_tqdm_hook(lambda bar, args, options: EmptyTqdm(*args, **options))


_LOADING_ERRORS = (
    *(OSError, ValueError, ImportError, KeyError, AttributeError, TypeError, RuntimeError),
    SafetensorError,
)
"""Exceptions that the library raises for files, configs and names that it cannot use."""
_WRAPPER_PREFIXES = {
    "_orig_mod.": "a compiled model's `state_dict` was saved: save the model inside (`model._orig_mod`)",
    "base_model.model.": "peft's wrapper was saved: `merge_and_unload()` the adapter and save what that returns",
    "module.": "the wrapper of DataParallel or DDP was saved: save the model inside (`model.module`)",
    "_fsdp_wrapped_module.": "FSDP's wrapper was saved: gather the full state of the model inside and save that",
}
"""Prefixes that wrappers add to the names of tensors, and the remedy for each."""
_MAX_NAMES_SHOWN = 3
NO_TEMPLATE = "none"
"""Value of `model.chat_template` for prompts without a template."""


@contextmanager
def convert_loading_errors(subject: str, name: str) -> Iterator[None]:
    """Turns errors of the library into a ConfigError with a remedy.

    subject: "the model" or "its tokenizer". name: the value of `model.name`.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except _LOADING_ERRORS as error:
        text = str(error).strip() or repr(error)
        if "scaled_dot_product_attention" in text:
            raise ConfigError(
                f"model.name={name}: {text.split()[0]} does not support SDPA attention: set "
                "model.attn_implementation=eager"
            ) from error
        remedy = (
            "Set model.attn_implementation=sdpa, or install that kernel"
            if "FlashAttention" in text or "flash_attn" in text
            else "Give a local folder in Hugging Face format (model.name=path/to/folder), or check the name and the "
            "connection to the hub"
        )
        raise ConfigError(
            f"model.name={name}: {subject} could not be loaded ({type(error).__name__}: {text.splitlines()[0]}). "
            f"{remedy}"
        ) from error


@contextmanager
def name_reference_in_errors(config: Config) -> Iterator[None]:
    """Replaces `model.name` by `ref_model.name` in a ConfigError where the latter names the files."""
    try:
        yield
    except ConfigError as error:
        if config.ref_model.name is None:
            raise
        raise ConfigError(re.sub(r"\bmodel\.name=", "ref_model.name=", str(error))) from error


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads a tokenizer with the chat template of the prompts, if any. Raises ConfigError."""
    tokenizer = load_saved_tokenizer(config)
    if config.chat_template == NO_TEMPLATE:
        tokenizer.chat_template = None
    elif not tokenizer.chat_template:
        log.warning(
            "model.name=%s: the tokenizer has no chat template, so a prompt is the text of its messages, as "
            "with model.chat_template=%s; set model.chat_template=FILE for a chat model",
            config.name,
            NO_TEMPLATE,
        )
    return tokenizer


def load_saved_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads a tokenizer as an export saves it, with the configured template and its arguments.

    Raises:
        ConfigError: the tokenizer cannot be loaded, the template cannot render a message, or the template does not read
            an argument of `model.chat_template_kwargs`.
    """
    with convert_loading_errors("its tokenizer", config.name):
        tokenizer = AutoTokenizer.from_pretrained(model_path(config.name), trust_remote_code=False)
    name = config.chat_template
    if name is None or name == NO_TEMPLATE:
        set_template_arguments(tokenizer, config.chat_template_kwargs)
        return tokenizer
    setting, path = f"model.chat_template={name}", Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting}: no such file (looked from {Path.cwd()}); give a file of Jinja, or {NO_TEMPLATE}")
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        set_template_arguments(tokenizer, config.chat_template_kwargs)
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except ConfigError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(f"{setting}: the template cannot render a message ({error}); correct the file") from error
    if "question" not in str(rendered):
        raise ConfigError(f"{setting}: the template leaves out the user's message; correct the file")
    return tokenizer


def saved_eos_token_ids(name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the `end_tokens` of the files of a model, without loading its weights."""
    path = model_path(name)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the model has no generation config
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
    return end_tokens(generation, tokenizer)


def end_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns every token that ends a completion.

    These are the tokens of the generation config, the tokenizer and the chat template.
    """
    configured = generation.eos_token_id if generation else None
    ids = configured if isinstance(configured, list) else [configured]
    ends = (*ids, tokenizer.eos_token_id, turn_end_token(tokenizer))
    return sorted({token for token in ends if token is not None})


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Loads a causal language model in `model.dtype`.

    Raises:
        ConfigError: the model cannot be loaded, holds values that are not finite, or changes its logits after
            the head.
    """
    model = _load(AutoModelForCausalLM, config, getattr(torch, config.dtype), device)
    check_output_head(model)
    return model


def load_in_4bit(config: ModelConfig, device: torch.device, compute: torch.dtype) -> PreTrainedModel:
    """Loads a model with every linear layer but the head in 4 bits.

    The format is nf4 with scales in 8 bits (arXiv 2305.14314, section 3); the other weights are in
    `model.dtype`. Layers are quantized one by one as the weights come from the files.

    compute: dtype of multiplications. Raises as `load_model`.
    """
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    dtype = getattr(torch, config.dtype)
    model = _load(AutoModelForCausalLM, config, dtype, device, quantization_config=settings)
    del model.config.quantization_config  # a saved copy of this model has full weights
    layers: Iterator[Any] = model.modules()
    for layer in layers:
        if any(is_quantized(parameter) for parameter in layer.parameters(recurse=False)):
            # The fastest CPU kernels reorder the weights on first use, and the reordered weights have no backward
            # pass.
            layer.support_avx512bf16_for_cpu = False
    check_output_head(model)
    return model


def load_frozen(config: ModelConfig, device: torch.device, autocast: torch.dtype | None) -> PreTrainedModel:
    """Loads a model that scores under `autocast` and is never trained.

    Autocast rounds the weights of linear layers to its dtype for each multiplication. Here these weights are
    stored rounded, which gives equal results in half the memory. Embeddings, which may be the output head
    too, and norms keep float32. Raises as `load_model`.
    """
    dtype = getattr(torch, config.dtype)
    loader: Any = AutoModelForCausalLM
    if autocast is not None and dtype == torch.float32:
        bare_model = make_skeleton(config)
        architecture = type(bare_model)
        others = (module for module in bare_model.modules() if not isinstance(module, nn.Linear))
        float32_ids = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
        named = bare_model.named_parameters()
        attributes = {"_keep_in_fp32_modules_strict": {name for name, one in named if id(one) in float32_ids}}
        dtype, loader = autocast, type(architecture.__name__, (architecture,), attributes)
    model = _load(loader, config, dtype, device)
    # Linear layers in half precision need autocast to compute at all.
    check_output_head(model, autocast)
    return model


def make_skeleton(config: ModelConfig) -> PreTrainedModel:
    """Builds a model without weights from its config.json: layers and shapes, on the meta device."""
    files = AutoConfig.from_pretrained(model_path(config.name), trust_remote_code=False)
    return _meta_model(files, getattr(torch, config.dtype), config.attn_implementation)


def make_buffers(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Computes the buffers of a model from its config.json, on the CPU, by name."""
    files = AutoConfig.from_pretrained(model_path(config.name), trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            files, dtype=getattr(torch, config.dtype), attn_implementation=config.attn_implementation
        )
    return dict(model.named_buffers())


def make_local_skeleton(config: ModelConfig) -> PreTrainedModel:
    """Builds a model without weights on the meta device, in `model.dtype`, without any download.

    Raises:
        ConfigError: config.json is neither on this machine nor known by the name of the model.
    """
    raw = find_model_config(config.name)
    if raw is None:
        raise ConfigError(
            f"model.name={config.name}: its config.json is not on this machine, so the layers are unknown; "
            "load the model once, or give a local folder"
        )
    with convert_loading_errors("the model", config.name):
        return _meta_model(AutoConfig.for_model(**raw), getattr(torch, config.dtype), config.attn_implementation)


def _meta_model(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Builds a causal language model on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    return model


def _load(
    loader: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device, **settings: Any
) -> PreTrainedModel:
    """Loads weights from files to their device one by one.

    Raises:
        ConfigError: the files hold other tensors, or values that are not finite. Such values would make every
            log-prob NaN, and an error elsewhere would hide the cause.
    """
    with convert_loading_errors("the model", config.name), silence_transformers():
        model_and_report = loader.from_pretrained(
            model_path(config.name),
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            device_map={"": device},
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loading_report` refuses them
            **settings,
        )
    model: PreTrainedModel = model_and_report[0]
    check_loading_report(config.name, model, model_and_report[1])
    nonfinite = [
        key
        for key, tensor in model.named_parameters()
        if not torch.isfinite(dequantize_weight(tensor, model.get_submodule(key.rpartition(".")[0]))).all()
    ]
    refuse_nonfinite_weights(config.name, model.dtype, nonfinite)
    return model


def refuse_nonfinite_weights(name: str, dtype: torch.dtype, nonfinite: Sequence[str]) -> None:
    """Raises ConfigError if a model has weights that are not finite; `nonfinite`: their names."""
    if not nonfinite:
        return
    others = f" and {len(nonfinite) - 1} more of its tensors hold" if len(nonfinite) > 1 else " holds"
    raise ConfigError(
        f"model.name={name}: {nonfinite[0]}{others} values that are not finite (NaN or infinite): the files are "
        f"damaged, or {dtype} cannot hold the saved values; download or save the model again"
    )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silences transformers' warnings for the block; `check_loading_report` replaces its table of tensors."""
    level = library_log.get_verbosity()
    library_log.set_verbosity_error()
    try:
        yield
    finally:
        library_log.set_verbosity(level)


def check_loading_report(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuses files whose tensors are not those of the model.

    Only a tied head may be absent. report: the library's report of `output_loading_info`.

    Raises:
        ConfigError: tensors are missing, unknown to the model, or of another shape; the message has names and
            counts.
    """
    missing = sorted(report["missing_keys"])  # the report leaves a tied head out
    unexpected = sorted(report["unexpected_keys"])
    mismatched = sorted(report["mismatched_keys"])
    problems = []
    if missing:
        problems.append(f"the files lack {_count_and_names(missing)}")
    if unexpected:
        problems.append(f"the model has no {_count_and_names(unexpected)}")
    if mismatched:
        tensor, saved, own = mismatched[0]
        shapes = f" ({tensor} is {list(saved)} in the files and {list(own)} in the model)"
        problems.append(f"the shape differs for {_count_and_names([one[0] for one in mismatched])}{shapes}")
    problems += [str(message).splitlines()[0] for message in report.get("error_msgs", ())]
    if not problems:
        return
    prefix = next((each for each in _WRAPPER_PREFIXES if any(key.startswith(each) for key in unexpected)), None)
    empty = any(0 in saved for _, saved, _ in mismatched)
    remedy = (
        f"Names begin with {prefix}: {_WRAPPER_PREFIXES[prefix]}"
        if prefix
        else (
            "ZeRO-3 saves empty tensors in place of shards: gather the shards (DeepSpeed's zero_to_fp32.py) "
            "and save again"
        )
        if empty
        else f"Weights and config.json must be of the same {type(model).__name__}: save the model again"
    )
    raise ConfigError(f"model.name={name}: {'; '.join(problems)}. {remedy}")


def _count_and_names(tensors: list[str]) -> str:
    """Returns the number of tensors and the first names."""
    more = f" and {len(tensors) - _MAX_NAMES_SHOWN} more" if len(tensors) > _MAX_NAMES_SHOWN else ""
    return f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}: {', '.join(tensors[:_MAX_NAMES_SHOWN])}{more}"


def check_output_head(model: PreTrainedModel, autocast: torch.dtype | None = None) -> None:
    """Checks that a model's logits are its output head's of its last hidden states.

    The loss applies the output head by itself, in chunks. autocast: dtype in which the model computes; None:
    the dtype of its weights.

    Raises:
        ConfigError: the model computes more after its last hidden state (soft-capping, scaling, another
            layer), or requires more than token ids.
    """
    ids = torch.arange(4, device=model.device)[None]
    subject = f"model.name={model.config.name_or_path}: {type(model).__name__}"
    try:
        with torch.no_grad(), torch.autocast(model.device.type, autocast, enabled=autocast is not None):
            logits = model(ids).logits
            logits_dtype, logits = logits.dtype, logits.float()
            hidden = model.base_model(ids).last_hidden_state
            head: Any = model.get_output_embeddings()
            head_logits = nn.functional.linear(hidden.to(head.weight.device), head.weight, head.bias).float()
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"{subject} is not a language model with an output head that computes the logits from the last "
            f"hidden states ({type(error).__name__}: {reason}); choose another model"
        ) from error
    # Kernels round sums in half precision differently; in float32 soft-capping shows even for small logits.
    rounding = 1e-5 if logits_dtype == torch.float32 else 1e-2
    if (logits - head_logits.to(logits.device)).abs().max() > rounding * logits.abs().max():
        raise ConfigError(
            f"{subject} changes its logits after the output head (soft-capping, scaling, a layer before the "
            "head), which the chunked loss does not reproduce; choose another model"
        )
