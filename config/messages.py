"""Hydra's and OmegaConf's errors as one readable message: the value, the place, the remedy."""

import dataclasses
import difflib
import re
from typing import Any

from config.errors import ConfigError


def known_keys(config_class: type[Any], prefix: str = "") -> list[str]:
    """Every dotted key of a tree of dataclasses."""
    keys: list[str] = []
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(field.type):
            assert isinstance(field.type, type)
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys


def readable(error: BaseException) -> str:
    """One message for a user who mistyped something."""
    chain = _chain(error)
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
    text = str(error)
    unknown = re.search(r"Could not (?:override|append to) (?:config\. )?'([^']+)'", text)
    if unknown:
        return _unknown_key(unknown.group(1))
    key = next(
        (found.group(1) for link in chain if (found := re.search(r"full_key: (\S+)", str(link)))), None
    )
    first = str(chain[-1]).splitlines()[0]
    if key is not None:
        return f"{key}: {first}" if "not in" not in first else _unknown_key(key)
    return text.splitlines()[0] if "config_path" not in text else text


def _unknown_key(key: str) -> str:
    from config.schema import Config

    known = known_keys(Config)
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    close += [other for other in known if other.split(".")[-1] == key.split(".")[-1] and other not in close]
    hint = f"did you mean {' or '.join(close[:3])}?" if close else "config/schema.py lists every field"
    return f"{key}: no such configuration key; {hint}"


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links:
        links.append(current)
        current = current.__cause__ or current.__context__
    return links
