"""Messages for errors of Hydra and OmegaConf, and for unknown configuration keys, with remedies."""

import dataclasses
import difflib
import re
import shlex
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.cli.keys_of_other_trainers import section_hint, translate_key, untrained_section_key
from config.schema.config import Config
from config.schema.errors import ConfigError, causes
from config.schema.former_names import KEYS
from config.schema.trust_region import TrustRegion

_PLUGINS = {
    "hydra-joblib-launcher": "launcher/joblib",
    "hydra-submitit-launcher": "launcher/submitit_local launcher/submitit_slurm",
    "hydra-ray-launcher": "launcher/ray launcher/ray_aws",
    "hydra-rq-launcher": "launcher/rq",
    "hydra-optuna-sweeper": "sweeper/optuna",
    "hydra-ax-sweeper": "sweeper/ax",
    "hydra-nevergrad-sweeper": "sweeper/nevergrad",
    "hydra-colorlog": "job_logging/colorlog hydra_logging/colorlog",
}
PLUGINS = {f"hydra/{name}": package for package, names in _PLUGINS.items() for name in names.split()}
"""Package that provides each Hydra plugin, for the message about a plugin that is not installed."""
NOT_ON_BASE = (
    "the config is not built on base; begin its file with\n  defaults: [base, _self_]\nand then set the "
    "fields that differ (example: config/grpo_quickstart.yaml)"
)
_NOT_A_NAME = "Config group override must be a string or a list"
_NOT_A_RANGE = "The `low` value must be"  # the beginning of Optuna's error about an interval
_LIST = "set a list, {key}=[first,second]"
_NAMES = "set names and values, {key}={{name:value}}"
_SECTION = "{key} is a section; set its fields, {key}.FIELD=value"
_REMEDIES = (
    ("is not a ListConfig", _LIST),
    (r"Cannot convert '(list|dict|ListConfig|DictConfig)'", "set a single value"),
    ("is not Optional|Incompatible value 'None'", "null is not allowed; set a value"),
    ("could not be converted to Integer", "set a whole number"),
    ("could not be converted to Float", "set a number"),
    ("is not a valid bool", "set true or false"),
    ("is not a subclass of TrustRegion", "write each item with its fields, {{FIELD:value}}"),
    ("is not a subclass of", _SECTION),
    (r"to Dict\[", _NAMES),
    ("does not support deletion", "a field cannot be removed; set its value"),
)
"""Pairs of a regular expression for OmegaConf's message and the remedy."""


def known_keys(config_class: type[Any], prefix: str = "") -> list[str]:
    """Returns every dotted key of a tree of dataclasses."""
    keys: list[str] = []
    for field in dataclasses.fields(config_class):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys


def user_message(error: BaseException) -> str:
    """Returns the message for an error that comes from the user's input."""
    chain, text = causes(error), str(error)
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
        if isinstance(link, OmegaConfBaseException) and link.object_type is TrustRegion:
            return _invalid_item_message(str(link.full_key), str(link).splitlines()[0])
    unknown = re.search(r"Could not (?:override|append to) (?:config\. )?'([^']+)'", text)
    if unknown:
        return unknown_key_message(unknown.group(1))
    if isinstance(error, MissingConfigException):
        return _missing_file_message(error)
    if isinstance(error, OverrideParseException):
        return _syntax_error_message(error)
    if text.startswith(_NOT_A_RANGE):
        return f"interval(low, high) of the sweep: {error}"
    file = re.match(r"In '(\S+)': \w+ raised while composing config", text)
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and (place := re.search(r"full_key: (\S+)", str(link))):
            return _invalid_value_message(place.group(1), str(link).splitlines()[0], file[1] if file else "")
    first = text.splitlines()[0]
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'$", first)
    if ambiguous:
        key, _, value = ambiguous.group(1).partition("=")
        return (
            f"{key}={value}: several values; add --multirun for one run per value, write "
            f"{shlex.quote(f'{key}=[{value}]')} for a list, or {quoted_override(key, value)} for a text"
        )
    if first.startswith(_NOT_A_NAME):
        return "policy and optimizer take the name of a preset, such as policy=dapo; policy.FIELD=value sets a field"
    duplicate = re.match(r"Multiple values for (\S+)\. |(\S+) appears more than once in the final defaults list", first)
    if duplicate:
        name = duplicate[1] or duplicate[2]
        return (
            f"{name}: an option is chosen already; remove the + to choose another option, or write `override "
            f"{name}: OPTION` in the defaults list of a file"
        )
    return text if "config_path" in text else first


def is_user_error(error: BaseException) -> bool:
    """Whether a ValueError of another library comes from the user's input."""
    return isinstance(error, ValueError) and str(error).startswith((_NOT_A_NAME, _NOT_A_RANGE))


def unknown_key_message(key: str) -> str:
    """Returns the message for an unknown key, with its equivalent or the nearest keys."""
    if key in KEYS:
        return f"{key}: the key is now called {KEYS[key]}; set {KEYS[key]}=VALUE"
    if key.startswith("hydra."):
        return f"{key}: Hydra has no such key; run with --cfg hydra to print all keys of Hydra"
    known = known_keys(Config)
    if key in known:
        return f"{key}: {NOT_ON_BASE}"
    prefix_and_rest = untrained_section_key(key)
    if prefix_and_rest is not None:
        prefix, rest = prefix_and_rest
        rests = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
        close = [prefix + other for other in difflib.get_close_matches(rest, rests, n=3, cutoff=0.75)]
    else:
        last = key.split(".")[-1]
        sections = {other[: dot.start()] for other in known for dot in re.finditer(r"\.", other)}
        close = difflib.get_close_matches(key, [*known, *sorted(sections)], n=3, cutoff=0.75)
        close += [other for other in known if other.split(".")[-1] == last and other not in close]
    hint = translate_key(key)
    if hint is None and not close:
        hint = section_hint(key)
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.55)
    if hint is None:
        hint = f"did you mean {' or '.join(close[:3])}?" if close else "docs/config.md lists every key"
    return f"{key}: no such configuration key; {hint}"


def _invalid_value_message(key: str, text: str, file: str) -> str:
    """Returns the message for a value that OmegaConf rejects.

    text: OmegaConf's message. file: the config file of the value, or "".
    """
    where = f" (in {file}.yaml)" if file else ""
    if file.partition("/")[0] == key and "/" in file:
        return (
            f"{key}: no such configuration section{where}; the settings of a file in {key}/ belong to this "
            "section. For settings of other sections, begin the file with\n  # @package _global_"
        )
    if re.match(r"Key '.*' not in '", text):
        return unknown_key_message(key) + where
    remedy = next((remedy for part, remedy in _REMEDIES if re.search(part, text)), None)
    if text.startswith("Cannot merge DictConfig with"):
        default = OmegaConf.select(OmegaConf.structured(Config), key)
        remedy = _SECTION if OmegaConf.is_dict(default) else _LIST
        remedy = _NAMES if OmegaConf.get_type(default) is dict else remedy
    return f"{key}: {text.rstrip('.')}" + (f"; {remedy.format(key=key)}" if remedy else "") + where


def _invalid_item_message(field: str, text: str) -> str:
    """Returns the message for an invalid item of `policy.trust_regions`.

    OmegaConf's own message does not name the list. text: that message.
    """
    known = [each.name for each in dataclasses.fields(TrustRegion)]
    if field not in known:
        return f"policy.trust_regions: {field}: no such field of an item; {_suggest_choices(field, known)}"
    remedy = next((f"; {remedy}" for part, remedy in _REMEDIES if re.search(part, text)), "")
    return f"policy.trust_regions: {field}: {text.rstrip('.')}{remedy.format(key=field)}"


def _missing_file_message(error: MissingConfigException) -> str:
    """Returns the message for a config file or group option that does not exist."""
    text, missing = str(error), str(error.missing_cfg_file or "")
    folders = [Path(found) for found in re.findall(r"path=file://(\S+)", text)]
    if text.startswith("Cannot find primary config"):
        # Base configs have no model or data, so that no run can start from one of them.
        found = {path.stem for folder in folders for path in folder.glob("*.yaml")}
        names = sorted(name for name in found if not name.startswith("base"))
        return f"--config-name {missing}: no such config; {_suggest_choices(missing, names)}"
    group, _, option = missing.rpartition("/")
    if missing in PLUGINS:
        return f"{group}={option}: the plugin is not installed; run pip install {PLUGINS[missing]}"
    if group:
        place = next((folder / group for folder in folders if (folder / group).is_dir()), None)
        options = list(error.options or ()) or sorted(path.stem for path in (place or Path()).glob("*.yaml"))
        return f"{group}={option}: no such option; {_suggest_choices(option, options)}"
    first = text.splitlines()[0]
    if any((folder / "base.yaml").is_file() for folder in folders):
        return first
    return (
        f"{first} --config-path replaces the folder of the shipped configs; set --config-dir FOLDER instead, "
        f"or add the shipped configs with hydra.searchpath=[file://{Path(__file__).parents[1]}]"
    )


def _suggest_choices(wrong: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(wrong, choices, n=1, cutoff=0.4)
    start = f"did you mean {near[0]}? Choose" if near else "choose"
    return f"{start} one of {', '.join(choices)}"


def _syntax_error_message(error: OverrideParseException) -> str:
    """Returns the message for an override that Hydra's grammar rejects.

    The most frequent cause is a text with commas, colons or equals signs.
    """
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"{error.override}: give a value, {error.override}=VALUE"
    if value[:1] in ("[", "{"):
        return (
            f"{error.override}: the brackets or braces are not closed, or hold text that needs quotes; write "
            f"{key}=[first,second] or {key}={{name:value}}, and put the whole argument in single quotes for "
            "the shell"
        )
    # The value without an opening quote that has no closing one.
    bare = value.strip("\"'") if value.startswith(('"', "'")) else value
    return (
        f"{error.override}: Hydra parses commas, colons, equals signs and brackets; quote a text with such "
        f"characters twice: {quoted_override(key, bare)}"
    )


def quoted_override(key: str, value: str) -> str:
    """Returns the shell-quoted override `key=value` for any text."""
    return shlex.quote(f"{key}={quoted_text(value)}")


def quoted_text(value: str) -> str:
    """Returns a text in Hydra's double quotes, for any text."""
    # Inside Hydra's quotes a backslash stands for itself unless a quote follows.
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + ('\\"' if match[2] else ""), value)
    return f'"{escaped}"'
