"""Loads the tokenizer of `model.name` and checks the model's files, without reading weights.

A run does so before anything is started from the files.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.control_tokens import turn_end_token
from torchgrpo.plan.model_shape import model_path, rope_limit, rope_limit_message
from torchgrpo.training.base_weights import weight_files
from torchgrpo.training.model_loading import (
    check_loading_report,
    convert_loading_errors,
    load_tokenizer,
    make_skeleton,
    silence_transformers,
)


def load_checked_tokenizer(config: ModelConfig, longest: int) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model and checks all files of the model.

    Raises as `load_tokenizer` and `check_model_files`.
    """
    tokenizer = load_tokenizer(config)
    check_model_files(config, tokenizer, longest)
    return tokenizer


def check_model_files(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, longest: int = 0) -> None:
    """Refuses a model whose files show that training or sampling is impossible; reads no weight.

    longest: tokens of prompt and response together; 0 for none.

    Raises:
        ConfigError: the weights are quantized, the tensors are not those of config.json, the model lacks the
            requested kind of attention, its rotary embeddings depend on the length, or its tokenizer has ids
            beyond the embedding.
    """
    with convert_loading_errors("the model", config.name), silence_transformers():
        _check_weight_format(config.name)
        bare_model = make_skeleton(config)
        shapes: dict[str, torch.Tensor] = {}
        for file in set(weight_files(model_path(config.name)).values()):
            with safe_open(file, "pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118, the file is no dict
                    shapes[tensor] = torch.empty(opened.get_slice(tensor).get_shape(), device="meta")
        if shapes:  # files of other formats are checked when the model is loaded
            loaded: Any = type(bare_model).from_pretrained(
                None,
                config=bare_model.config,
                state_dict=shapes,
                dtype=bare_model.dtype,
                attn_implementation=config.attn_implementation,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            check_loading_report(config.name, loaded[0], loaded[1])
    limit = rope_limit(bare_model.config.get_text_config().to_dict())
    if limit and longest > limit:
        raise ConfigError(rope_limit_message(config.name, longest, limit))
    rows = _embedding_row_count(bare_model)
    added = tokenizer.added_tokens_encoder  # these may exceed the embedding, for no prompt may contain them
    ends = {tokenizer.eos_token_id, turn_end_token(tokenizer)}
    beyond = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and (token not in added or number in ends)
    }
    if beyond:
        token, number = max(beyond.items(), key=lambda pair: pair[1])
        raise ConfigError(
            f"model.name={config.name}: the tokenizer has {len(beyond)} tokens beyond the {rows} rows of the "
            f"model's embedding ({token!r} is {number}): use the tokenizer that the model was trained with, "
            "or call `model.resize_token_embeddings(len(tokenizer))` and save both"
        )


def _check_weight_format(name: str) -> None:
    """Refuses folders with an adapter, and quantized weights. Raises ConfigError."""
    if Path(model_path(name), "adapter_config.json").is_file():
        raise ConfigError(
            f"model.name={name}: the folder has an adapter beside the weights (adapter_config.json), which "
            "transformers would load automatically: merge the adapter into the weights, or remove the file"
        )
    files = AutoConfig.from_pretrained(model_path(name), trust_remote_code=False)
    configs = (files, files.get_text_config())
    saved = next((one for config in configs if (one := getattr(config, "quantization_config", None)) is not None), None)
    if saved is None:
        return
    settings = saved if isinstance(saved, dict) else saved.to_dict()
    method = settings.get("quant_method") or "quantized"
    raise ConfigError(
        f"model.name={name}: the weights are stored quantized ({method}), which neither training nor a push to "
        "engines supports: use the unquantized model; train_model.lora.enabled=true "
        "train_model.lora.quantization=nf4 holds them in 4 bits during training"
    )


def embedding_row_count(config: ModelConfig) -> int:
    """Returns the number of token ids in a model's embedding, by its config.json."""
    return _embedding_row_count(make_skeleton(config))


def _embedding_row_count(model: PreTrainedModel) -> int:
    """Returns the number of rows of a model's input embedding."""
    embedding: Any = model.get_input_embeddings()
    rows: int = embedding.weight.shape[0]
    return rows
