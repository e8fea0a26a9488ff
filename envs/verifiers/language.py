"""The language of a text, the same on every call. `langdetect` draws random numbers; here they are seeded."""

from functools import cache
from typing import Any

from config.schema.errors import ConfigError

SEED = 0


def detect_language(text: str) -> str | None:
    """ISO 639-1 code (`zh-cn`, `zh-tw`); None for a text without letters. Raises as `load`."""
    detect, undecided = load()
    try:
        return str(detect(text))
    except undecided:
        return None


@cache
def load() -> tuple[Any, type[Exception]]:
    """The detector, seeded, and the exception it raises for texts it cannot judge."""
    try:
        import langdetect
    except ImportError as error:
        raise ConfigError(
            "IFEval's language rules need langdetect: pip install -e '.[ifeval]' in the project's folder"
        ) from error
    langdetect.DetectorFactory.seed = SEED
    return langdetect.detect, langdetect.LangDetectException
