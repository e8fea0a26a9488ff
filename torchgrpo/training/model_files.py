"""The files of `model.name`, checked before anything is started from them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from config.schema.errors import ConfigError
from config.schema.models import ModelConfig
from envs.control_tokens import turn_end
from torchgrpo.plan.model_shape import beyond_rope_limit, model_path, rope_limit
from torchgrpo.training.base_files import weight_files
from torchgrpo.training.model_loading import check_report, load_tokenizer, loading, quiet_library, skeleton


def load_checked_tokenizer(config: ModelConfig, longest: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and check all its files. Raises as `load_tokenizer` and `check_files`."""
    tokenizer = load_tokenizer(config)
    check_files(config, tokenizer, longest)
    return tokenizer


def check_files(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, longest: int = 0) -> None:
    """Refuse a model that cannot be trained or sampled from as its files say. No weight is read.

    longest: tokens of prompt and response together; 0 for none.

    Raises:
        ConfigError: its weights are quantized, its tensors are not those of its config.json, it has no attention of
            the kind that is asked for, its rotary embeddings are not the same for all lengths, or its tokenizer has ids
            that its embedding has not.
    """
    with loading("the model", config.name), quiet_library():
        _check_weights(config.name)
        bare = skeleton(config)
        shapes: dict[str, torch.Tensor] = {}
        for file in set(weight_files(model_path(config.name)).values()):
            with safe_open(file, "pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118, it is no dict
                    shapes[tensor] = torch.empty(opened.get_slice(tensor).get_shape(), device="meta")
        if shapes:  # other formats are read when the model is loaded
            loaded: Any = type(bare).from_pretrained(
                None,
                config=bare.config,
                state_dict=shapes,
                dtype=bare.dtype,
                attn_implementation=config.attn_implementation,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            check_report(config.name, loaded[0], loaded[1])
    limit = rope_limit(bare.config.get_text_config().to_dict())
    if limit and longest > limit:
        raise ConfigError(beyond_rope_limit(config.name, longest, limit))
    rows = _rows(bare)
    added = tokenizer.added_tokens_encoder  # which may be beyond the embedding: they may be in no prompt
    ends = {tokenizer.eos_token_id, turn_end(tokenizer)}
    beyond = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and (token not in added or number in ends)
    }
    if beyond:
        token, number = max(beyond.items(), key=lambda pair: pair[1])
        raise ConfigError(
            f"model.name={config.name}: its tokenizer has {len(beyond)} tokens beyond the {rows} rows of the model's "
            f"embedding ({token!r} is {number}): take the tokenizer that the model was trained with, or "
            "`model.resize_token_embeddings(len(tokenizer))` and save both"
        )


def _check_weights(name: str) -> None:
    if Path(model_path(name), "adapter_config.json").is_file():
        raise ConfigError(
            f"model.name={name}: it has an adapter beside the weights (adapter_config.json), which the library would "
            "put on by itself: merge it into them, or take the file away"
        )
    files = AutoConfig.from_pretrained(model_path(name), trust_remote_code=False)
    parts = (files, files.get_text_config())
    saved = next(
        (one for part in parts if (one := getattr(part, "quantization_config", None)) is not None), None
    )
    if saved is None:
        return
    described = saved if isinstance(saved, dict) else saved.to_dict()
    method = described.get("quant_method") or "quantized"
    raise ConfigError(
        f"model.name={name}: its weights are saved quantized ({method}), and neither training nor a push to engines "
        "has use for such: take the model with whole weights; train_model.lora.enabled=true "
        "train_model.lora.quantization=nf4 holds it in 4 bits while it trains"
    )


def embedding_rows(config: ModelConfig) -> int:
    """Token ids that a model has an embedding of, by its config.json."""
    return _rows(skeleton(config))


def _rows(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    rows: int = embedding.weight.shape[0]
    return rows
