"""Checks of the files of `ref_model.name`, before anything is started."""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan.microbatches import longest_row
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training.model_files import check_files, embedding_rows
from torchgrpo.training.model_loading import load_saved_tokenizer, said_of_reference


def check_reference_files(tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Check the files of `ref_model.name`, if there is one; no weight is read. tokenizer: the policy's.

    Raises ConfigError as `check_same_tokens` and `check_files`.
    """
    if not scored_by_another(config):
        return
    own = check_same_tokens(tokenizer, config)
    with said_of_reference(config):
        check_files(config.reference_model, own, longest_row(config))


def scored_by_another(config: Config) -> bool:
    """Whether another model than the policy scores its tokens."""
    return config.ref_model.name is not None and config.policy.uses_reference


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of `ref_model.name`, which reads every token id as the policy does.

    It may have more tokens, and its embedding other rows for ids that are no token. tokenizer: the policy's.

    Raises:
        ConfigError: an id is another token to it, none, or beyond its embedding.
    """
    with said_of_reference(config):
        own = load_saved_tokenizer(replace(config.reference_model, chat_template=None))
    wanted, found = _tokens(tokenizer), _tokens(own)
    different = next((number for number in sorted(wanted) if found.get(number) != wanted[number]), None)
    if different is not None:
        teaches = config.policy.distill_coef != 0
        without = "distil from the policy itself (policy=opsd)" if teaches else "leave ref_model.name out"
        is_there = repr(found[different]) if different in found else "no token"
        raise ConfigError(
            f"ref_model.name={config.ref_model.name} has other tokens than model.name={config.model.name}: id "
            f"{different} is {is_there} to it and {wanted[different]!r} to the policy. It scores the ids that the "
            f"policy draws, so they must be the same to both: take a model of the same family, or {without}"
        )
    rows, drawn = embedding_rows(config.reference_model), embedding_rows(config.model)
    beyond = {number: token for number, token in wanted.items() if rows <= number < drawn}
    if beyond:
        number = min(beyond)
        raise ConfigError(
            f"ref_model.name={config.ref_model.name}: its embedding has {rows} rows, and the policy (model.name="
            f"{config.model.name}) can draw {len(beyond)} tokens beyond them ({beyond[number]!r} is {number}): resize "
            "it with `model.resize_token_embeddings(len(tokenizer))` and train it on them, or take another model"
        )
    return own


def has_tokenizer(name: str) -> bool:
    """Whether a model's tokenizer and config.json are here, in a folder or the hub's cache."""
    files = ("config.json", "tokenizer_config.json")
    return Path(model_path(name)).is_dir() or all(
        isinstance(try_to_load_from_cache(name, file), str) for file in files
    )


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The token of every id."""
    return {number: token for token, number in tokenizer.get_vocab().items()}
