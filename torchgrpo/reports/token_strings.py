"""Decodes the tokens of a completion to strings with the run's tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torchgrpo.plan.model_shape import model_path
from torchgrpo.reports.run_folder import read_settings

TokenDecoder = Callable[[Sequence[int]], list[str]]
"""Decodes token ids to one string per token; a token that completes no character gets an empty string."""
TOKENIZER_FILE = "tokenizer.json"


def make_token_decoder(settings: dict[str, object]) -> tuple[TokenDecoder | None, str]:
    """Returns the token decoder of a run, or None with a reason.

    Nothing is downloaded: a model of the Hugging Face hub must be in the local cache.
    """
    name = settings.get("model.name")
    if not isinstance(name, str):
        return None, "the run's settings do not name its model"
    path = tokenizer_file(name)
    if path is None:
        return None, f"{TOKENIZER_FILE} of model.name={name} is not on the machine that wrote this report"
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(path))

    def decode_tokens(token_ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in token_ids]

    return decode_tokens, ""


def tokenizer_file(name: str) -> Path | None:
    """Finds the tokenizer file of a model.

    name: a model folder, a run's folder (its initial model counts), or a hub name in the local cache.
    """
    folder = Path(model_path(name))
    if (folder / TOKENIZER_FILE).is_file():
        return folder / TOKENIZER_FILE
    initial_model = read_settings(folder).get("model.name") if folder.is_dir() else None
    if isinstance(initial_model, str) and initial_model != name:
        return tokenizer_file(initial_model)
    if folder.exists():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached_path = try_to_load_from_cache(name, TOKENIZER_FILE)
    except HFValidationError:  # the name is a path that does not exist
        return None
    return Path(cached_path) if isinstance(cached_path, str) else None
