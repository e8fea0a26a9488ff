"""A config as what differs from the defaults, in the form that the command line takes."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from config.cli.error_messages import text_in_quotes
from config.schema.config import Config
from config.schema.evaluation import EvalSetConfig

_PLAIN = re.compile(r"[A-Za-z_./][\w./@%+-]*")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "nan", "inf")
"""Texts that Hydra takes for something else, in any case."""


def overrides(config: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` of every setting that is another than its default, as typed in a shell; on `--config-name base` they
    give the config again. config: `dataclasses.asdict` of one, of this version or an earlier one."""
    defaults = asdict(Config())
    defaults["policy"]["constant_length"] = config["inference_model"]["max_tokens"]
    return [shlex.quote(text) for text in _different(config, defaults, "")]


def _different(config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, default in defaults.items():
        value, place = config.get(key, default), f"{prefix}{key}"
        if isinstance(default, dict) and default and isinstance(value, Mapping):
            yield from _different(value, default, f"{place}.")
        elif place == "eval.sets" and value:
            usual = asdict(EvalSetConfig())
            sets = {
                name: {key: one[key] for key in usual if key in one and one[key] != usual[key]}
                for name, one in value.items()
            }
            yield f"{place}={_literal(sets)}"
        elif value != default:
            yield f"{place}={_literal(value)}"


def _literal(value: Any) -> str:
    """A value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_literal(one)}' for key, one in value.items())}}}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else text_in_quotes(text)
