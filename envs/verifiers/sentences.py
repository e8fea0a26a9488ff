"""Sentences and words of a text by NLTK's Punkt model, which is read from local files and never downloaded."""

from functools import cache
from typing import Any

from config.errors import ConfigError


def split(text: str) -> list[str]:
    """The sentences of an English text, without the white space between them.

    Raises:
        ConfigError: NLTK or its data is missing.
    """
    return list(load().tokenize(text))


def words(text: str) -> list[str]:
    """Treebank words and punctuation marks of an English text, sentence by sentence. Raises as above."""
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    return [word for sentence in load().tokenize(text) for word in tokenizer.tokenize(sentence)]


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
