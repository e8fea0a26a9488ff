"""Errors of Hydra and OmegaConf as one readable message: the value, the place, the remedy."""

import dataclasses
import difflib
import re
import shlex
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.cli.other_trainers import own_section, section_elsewhere, translated
from config.schema.config import Config
from config.schema.errors import ConfigError, causes
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
"""What to install for a plugin of Hydra's that is not there."""
NOT_ON_BASE = (
    "the config is not built on base; its file begins with\n  defaults: [base, _self_]\n"
    "and then says what differs (config/grpo_quickstart.yaml is one)"
)
_NOT_A_NAME = "Config group override must be a string or a list"
_NOT_A_RANGE = "The `low` value must be"  # Optuna, of an interval
_LIST = "give a list, {key}=[first,second]"
_NAMES = "give names and values, {key}={{name:value}}"
_SECTION = "it is a section: set its fields, {key}.FIELD=value"
_REMEDIES = (
    ("is not a ListConfig", _LIST),
    (r"Cannot convert '(list|dict|ListConfig|DictConfig)'", "it takes one value"),
    ("is not Optional|Incompatible value 'None'", "null is no value for it"),
    ("could not be converted to Integer", "give a whole number"),
    ("could not be converted to Float", "give a number"),
    ("is not a valid bool", "give true or false"),
    ("is not a subclass of TrustRegion", "an item has fields, {{FIELD:value}}"),
    ("is not a subclass of", _SECTION),
    (r"to Dict\[", _NAMES),
    ("does not support deletion", "a field cannot be taken away, only set"),
)
"""What OmegaConf's text holds: what helps."""


def known_keys(config_class: type[Any], prefix: str = "") -> list[str]:
    """Every dotted key of a tree of dataclasses."""
    keys: list[str] = []
    for field in dataclasses.fields(config_class):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            keys += known_keys(field.type, f"{prefix}{field.name}.")
        else:
            keys.append(f"{prefix}{field.name}")
    return keys


def readable(error: BaseException) -> str:
    """One message for a user who mistyped something."""
    chain, text = causes(error), str(error)
    for link in chain:
        if isinstance(link, ConfigError):
            return str(link)
        if isinstance(link, OmegaConfBaseException) and link.object_type is TrustRegion:
            return _wrong_item(str(link.full_key), str(link).splitlines()[0])
    unknown = re.search(r"Could not (?:override|append to) (?:config\. )?'([^']+)'", text)
    if unknown:
        return unknown_key(unknown.group(1))
    if isinstance(error, MissingConfigException):
        return _missing_file(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if text.startswith(_NOT_A_RANGE):
        return f"interval(low, high) of the sweep: {error}"
    file = re.match(r"In '(\S+)': \w+ raised while composing config", text)
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and (place := re.search(r"full_key: (\S+)", str(link))):
            return _wrong_value(place.group(1), str(link).splitlines()[0], file[1] if file else "")
    first = text.splitlines()[0]
    several = re.match(r"Ambiguous value for argument '(.*)'$", first)
    if several:
        key, _, value = several.group(1).partition("=")
        return (
            f"{key}={value}: several values. One run for each: add --multirun. A list: "
            f"{shlex.quote(f'{key}=[{value}]')}. A text: {quoted(key, value)}"
        )
    if first.startswith(_NOT_A_NAME):
        return "policy and optimizer take the name of a preset, such as policy=dapo; policy.FIELD=value sets a field"
    twice = re.match(
        r"Multiple values for (\S+)\. |(\S+) appears more than once in the final defaults list", first
    )
    if twice:
        name = twice[1] or twice[2]
        return (
            f"{name}: an option has been chosen already; leave the + out to choose another, and write `override "
            f"{name}: OPTION` in the defaults list of a file"
        )
    return text if "config_path" in text else first


def is_readable(error: BaseException) -> bool:
    """Whether an exception that is neither Hydra's nor OmegaConf's is about what the user typed all the same."""
    return isinstance(error, ValueError) and str(error).startswith((_NOT_A_NAME, _NOT_A_RANGE))


def unknown_key(key: str) -> str:
    """The message for an unknown key: its name here, or the nearest keys."""
    if key.startswith("hydra."):
        return f"{key}: no such key of Hydra's; --cfg hydra prints those that there are"
    known = known_keys(Config)
    if key in known:
        return f"{key}: {NOT_ON_BASE}"
    own = own_section(key)
    if own is not None:
        beginning, rest = own
        rests = [other.removeprefix(beginning) for other in known if other.startswith(beginning)]
        close = [beginning + other for other in difflib.get_close_matches(rest, rests, n=3, cutoff=0.75)]
    else:
        last = key.split(".")[-1]
        sections = {other[: dot.start()] for other in known for dot in re.finditer(r"\.", other)}
        close = difflib.get_close_matches(key, [*known, *sorted(sections)], n=3, cutoff=0.75)
        close += [other for other in known if other.split(".")[-1] == last and other not in close]
    hint = translated(key)
    if hint is None and not close:
        hint = section_elsewhere(key)
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.55)
    if hint is None:
        hint = f"did you mean {' or '.join(close[:3])}?" if close else "docs/config.md lists every key"
    return f"{key}: no such configuration key; {hint}"


def _wrong_value(key: str, text: str, file: str) -> str:
    """`text`: what OmegaConf says of the value. `file`: the config that holds it, or nothing."""
    where = f" (in {file}.yaml)" if file else ""
    if file.partition("/")[0] == key and "/" in file:
        return (
            f"{key}: no such configuration section{where}; what a file of {key}/ says goes there, unless its "
            "first line is\n  # @package _global_"
        )
    if re.match(r"Key '.*' not in '", text):
        return unknown_key(key) + where
    remedy = next((remedy for part, remedy in _REMEDIES if re.search(part, text)), None)
    if text.startswith("Cannot merge DictConfig with"):
        wanted = OmegaConf.select(OmegaConf.structured(Config), key)
        remedy = _SECTION if OmegaConf.is_dict(wanted) else _LIST
        remedy = _NAMES if OmegaConf.get_type(wanted) is dict else remedy
    return f"{key}: {text.rstrip('.')}" + (f"; {remedy.format(key=key)}" if remedy else "") + where


def _wrong_item(field: str, text: str) -> str:
    """An item of `policy.trust_regions`, which OmegaConf does not place. text: its message about the field."""
    known = [each.name for each in dataclasses.fields(TrustRegion)]
    if field not in known:
        return f"policy.trust_regions: {field}: no such field of an item; {_choices(field, known)}"
    remedy = next((f"; {remedy}" for part, remedy in _REMEDIES if re.search(part, text)), "")
    return f"policy.trust_regions: {field}: {text.rstrip('.')}{remedy.format(key=field)}"


def _missing_file(error: MissingConfigException) -> str:
    """A config, or an option of a config group, that no file on the search path holds."""
    text, missing = str(error), str(error.missing_cfg_file or "")
    folders = [Path(found) for found in re.findall(r"path=file://(\S+)", text)]
    if text.startswith("Cannot find primary config"):
        # What others build on has no model or data of its own.
        found = {path.stem for folder in folders for path in folder.glob("*.yaml")}
        names = sorted(name for name in found if not name.startswith("base"))
        return f"--config-name {missing}: no such config; {_choices(missing, names)}"
    group, _, option = missing.rpartition("/")
    if missing in PLUGINS:
        return f"{group}={option}: it is not installed; pip install {PLUGINS[missing]}"
    if group:
        place = next((folder / group for folder in folders if (folder / group).is_dir()), None)
        options = list(error.options or ()) or sorted(path.stem for path in (place or Path()).glob("*.yaml"))
        return f"{group}={option}: no such option; {_choices(option, options)}"
    first = text.splitlines()[0]
    if any((folder / "base.yaml").is_file() for folder in folders):
        return first
    return (
        f"{first} --config-path puts a folder in the place of the configs that ship; --config-dir FOLDER adds it to "
        f"them, as hydra.searchpath=[file://{Path(__file__).parents[1]}] adds them to it"
    )


def _choices(wrong: str, known: list[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.4)
    return (f"did you mean {near[0]}? " if near else "") + f"There are: {', '.join(known)}"


def _unreadable(error: OverrideParseException) -> str:
    """An override that Hydra's grammar cannot take, most often a text with commas, colons or equals signs."""
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"{error.override}: give a value, {error.override}=VALUE"
    if value[:1] in ("[", "{"):
        return (
            f"{error.override}: the list or the braces do not end, or hold text that needs quotes; write "
            f"{key}=[first,second] or {key}={{name:value}}, all of it in single quotes for the shell"
        )
    # Without quotes that were meant to enclose it, and lack their other end.
    bare = value.strip("\"'") if value.startswith(('"', "'")) else value
    return (
        f"{error.override}: Hydra reads commas, colons, equals signs and brackets itself; a text with them is quoted "
        f"twice: {quoted(key, bare)}"
    )


def quoted(key: str, value: str) -> str:
    """An override of a text as it is typed in a shell, whatever the text holds."""
    return shlex.quote(f"{key}={text_in_quotes(value)}")


def text_in_quotes(value: str) -> str:
    """A text as Hydra reads it, whatever it holds."""
    # In Hydra's quotes a backslash is one, unless a quote follows.
    inside = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
    return f'"{inside}"'
