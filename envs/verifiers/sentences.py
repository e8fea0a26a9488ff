"""Sentences and words of a text by NLTK's Punkt model, which is read from local files and never downloaded."""

from functools import cache, lru_cache
from typing import Any

from config.schema.errors import ConfigError

KEPT = 16
"""Texts that are remembered: an answer has several rules, each read with up to eight of its variants."""


def split(text: str) -> list[str]:
    """The sentences of an English text, without the white space between them. Raises as `load`."""
    return list(_sentences(load(), text))


def words(text: str) -> list[str]:
    """Treebank words and punctuation marks of an English text, by sentences. Raises as `load`."""
    return list(_words(load(), text))


@lru_cache(maxsize=KEPT)
def _sentences(punkt: Any, text: str) -> tuple[str, ...]:
    return tuple(punkt.tokenize(text))


@lru_cache(maxsize=KEPT)
def _words(punkt: Any, text: str) -> tuple[str, ...]:
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    return tuple(word for sentence in _sentences(punkt, text) for word in tokenizer.tokenize(sentence))


@cache
def load() -> Any:
    """The English Punkt tokenizer.

    Raises:
        ConfigError: NLTK or its data is missing; says where it was looked for and how to get it.
    """
    try:
        import nltk
        from nltk.tokenize import PunktTokenizer
    except ImportError as error:
        raise ConfigError(
            "IFEval's and IFBench's sentence rules need NLTK: pip install -e '.[ifeval]' in the project's folder"
        ) from error
    try:
        return PunktTokenizer("english")
    except LookupError as error:
        raise ConfigError(
            "IFEval's and IFBench's sentence rules need NLTK's punkt_tab data, which is in none of "
            f"{', '.join(nltk.data.path)}: run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to a folder "
            "that holds tokenizers/punkt_tab/english"
        ) from error
