"""The text of each token of a completion, by the run's tokenizer, where that lies on this machine."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torchgrpo.plan.model_shape import model_path
from torchgrpo.reports.run_folder import settings_of

Pieces = Callable[[Sequence[int]], list[str]]
"""From token ids to a text each, which together are the whole text; empty for a token that ends no character."""
FILE = "tokenizer.json"


def pieces_of_run(settings: dict[str, object]) -> tuple[Pieces | None, str]:
    """What cuts a run's completions into pieces, or None; and, for a person, why there is none.

    Never asks the network: a model of the hub must lie in its cache.
    """
    name = settings.get("model.name")
    if not isinstance(name, str):
        return None, "the run's settings do not name its model"
    path = tokenizer_file(name)
    if path is None:
        return None, f"{FILE} of model.name={name} is not on the machine that made this report"
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(path))

    def pieces(token_ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in token_ids]

    return pieces, ""


def tokenizer_file(name: str) -> Path | None:
    """Of a folder in Hugging Face format, of the model that a run's folder began from, or of a cached hub name."""
    folder = Path(model_path(name))
    if (folder / FILE).is_file():
        return folder / FILE
    began_from = settings_of(folder).get("model.name") if folder.is_dir() else None
    if isinstance(began_from, str) and began_from != name:
        return tokenizer_file(began_from)
    if folder.exists():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, FILE)
    except HFValidationError:  # a path that is gone
        return None
    return Path(found) if isinstance(found, str) else None
