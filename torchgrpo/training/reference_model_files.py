"""Checks that model and tokenizer of `ref_model.name` fit the policy, without reading weights.

A run does so before anything is started.
"""

from dataclasses import replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.plan.microbatch_sizes import longest_row_tokens
from torchgrpo.plan.model_shape import model_path
from torchgrpo.training.model_files import check_model_files, embedding_row_count
from torchgrpo.training.model_loading import load_saved_tokenizer, name_reference_in_errors


def check_reference_files(tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Checks the files of `ref_model.name`, if it is set, without reading a weight.

    tokenizer: the policy's.

    Raises:
        ConfigError: as `check_same_tokens` and `check_model_files`.
    """
    if not has_separate_reference(config):
        return
    own = check_same_tokens(tokenizer, config)
    with name_reference_in_errors(config):
        check_model_files(config.reference_model, own, longest_row_tokens(config))


def has_separate_reference(config: Config) -> bool:
    """Whether a model other than the policy scores the policy's tokens."""
    return config.ref_model.name is not None and config.policy.uses_reference


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, config: Config) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of `ref_model.name` after checking that it has the policy's tokens.

    The tokenizer may have more tokens, and the embedding other rows for ids that are no token. tokenizer: the
    policy's.

    Raises:
        ConfigError: an id is another token for the reference model, no token, or beyond its embedding.
    """
    with name_reference_in_errors(config):
        own = load_saved_tokenizer(replace(config.reference_model, chat_template=None, chat_template_kwargs={}))
    policy_tokens, own_tokens = _token_by_id(tokenizer), _token_by_id(own)
    different = next((one for one in sorted(policy_tokens) if own_tokens.get(one) != policy_tokens[one]), None)
    if different is not None:
        is_teacher = config.policy.distill_coef != 0
        remedy = "distil from the policy itself (policy=opsd)" if is_teacher else "leave ref_model.name out"
        own_token = repr(own_tokens[different]) if different in own_tokens else "no token"
        raise ConfigError(
            f"ref_model.name={config.ref_model.name}: the tokens differ from those of "
            f"model.name={config.model.name}: id {different} is {own_token} to the reference and "
            f"{policy_tokens[different]!r} to the policy. Both need the same tokens, since the reference "
            f"scores the ids that the policy samples: choose a model of the same family, or {remedy}"
        )
    rows, policy_rows = embedding_row_count(config.reference_model), embedding_row_count(config.model)
    beyond = {number: token for number, token in policy_tokens.items() if rows <= number < policy_rows}
    if beyond:
        number = min(beyond)
        raise ConfigError(
            f"ref_model.name={config.ref_model.name}: the embedding has {rows} rows, and the policy "
            f"(model.name={config.model.name}) can sample {len(beyond)} tokens beyond those rows "
            f"({beyond[number]!r} is {number}): resize the embedding with "
            "`model.resize_token_embeddings(len(tokenizer))` and train the model on the new tokens, or "
            "choose another model"
        )
    return own


def has_tokenizer(name: str) -> bool:
    """Whether a model's tokenizer and config.json are on this machine.

    Looks into a local folder or the hub's cache.
    """
    files = ("config.json", "tokenizer_config.json")
    return Path(model_path(name)).is_dir() or all(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def _token_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Returns the token of every id."""
    return {number: token for token, number in tokenizer.get_vocab().items()}
