"""Formats settings that differ from the defaults as shell-quoted command-line overrides."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from config.cli.error_messages import quoted_text
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig

_PLAIN = re.compile(r"[A-Za-z_./][\w./@%+-]*")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")
"""Unquoted texts that Hydra reads as other types, in upper or lower case."""


def changed_overrides(config: Mapping[str, Any]) -> list[str]:
    """Returns shell-quoted `KEY=VALUE` overrides of every setting that differs from its default.

    Applied to `--config-name base`, the overrides restore the config.
    config: `dataclasses.asdict` of a `Config`, also of an earlier version.
    """
    defaults = asdict(Config())
    defaults["policy"]["constant_length"] = config["inference_model"]["max_tokens"]
    return [shlex.quote(text) for text in _changed_settings(config, defaults, "")]


def _changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, default in defaults.items():
        value, place = config.get(key, default), f"{prefix}{key}"
        if isinstance(default, dict) and default and isinstance(value, Mapping):
            yield from _changed_settings(value, default, f"{place}.")
        elif place == "eval.sets" and value:
            set_defaults = asdict(EvalSetConfig())
            sets = {
                name: {key: fields[key] for key in set_defaults if key in fields and fields[key] != set_defaults[key]}
                for name, fields in value.items()
            }
            yield f"{place}={_override_value(sets)}"
        elif value != default:
            yield f"{place}={_override_value(value)}"


def _override_value(value: Any) -> str:
    """Returns a value in the syntax of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_override_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_override_value(one)}' for key, one in value.items())}}}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else quoted_text(text)
