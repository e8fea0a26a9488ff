"""Splits a text into sentences and words by NLTK's Punkt model.

The model is read from local files and never downloaded.
"""

from functools import cache, lru_cache
from typing import Any

from config.schema.errors import ConfigError

CACHE_SIZE = 16
"""Number of cached texts: a response has several rules, each with up to eight variants."""


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of an English text, without the white space between them.

    Raises:
        ConfigError: NLTK or its data is missing.
    """
    return list(_cached_sentences(load_punkt(), text))


def split_words(text: str) -> list[str]:
    """Returns the Treebank words and punctuation marks of an English text.

    The text is split into sentences first.

    Raises:
        ConfigError: NLTK or its data is missing.
    """
    return list(_cached_words(load_punkt(), text))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_sentences(punkt: Any, text: str) -> tuple[str, ...]:
    return tuple(punkt.tokenize(text))


@lru_cache(maxsize=CACHE_SIZE)
def _cached_words(punkt: Any, text: str) -> tuple[str, ...]:
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    return tuple(word for sentence in _cached_sentences(punkt, text) for word in tokenizer.tokenize(sentence))


@cache
def load_punkt() -> Any:
    """Loads the English Punkt tokenizer.

    Raises:
        ConfigError: NLTK or its data is missing; the message names the searched folders and the remedy.
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
            "IFEval's and IFBench's sentence rules need NLTK's punkt_tab data, which was not found in "
            f"{', '.join(nltk.data.path)}; run `python -m nltk.downloader punkt_tab`, or set NLTK_DATA to a "
            "folder that holds tokenizers/punkt_tab/english"
        ) from error
