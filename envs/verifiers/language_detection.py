"""Detects the natural language of a text, with the same result on every call.

`langdetect` samples random numbers, which are seeded here.
"""

from functools import cache
from typing import Any

from config.schema.errors import ConfigError

SEED = 0


def detect_language(text: str) -> str | None:
    """Returns the ISO 639-1 code of a text's language (also `zh-cn`, `zh-tw`).

    The result is None for a text without letters.

    Raises:
        ConfigError: langdetect is not installed.
    """
    detect, undecided = load_detector()
    try:
        return str(detect(text))
    except undecided:
        return None


@cache
def load_detector() -> tuple[Any, type[Exception]]:
    """Returns the seeded detector and its exception for undecidable texts.

    Raises:
        ConfigError: langdetect is not installed.
    """
    try:
        import langdetect
    except ImportError as error:
        raise ConfigError(
            "IFEval's language rules need langdetect: pip install -e '.[ifeval]' in the project's folder"
        ) from error
    langdetect.DetectorFactory.seed = SEED
    return langdetect.detect, langdetect.LangDetectException
