"""The command line of `run=replay`: which objective a step is computed with beside the recorded one, and where."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from config.errors import ConfigError
from config.policy import PRESETS, PolicyConfig
from config.saved_settings import saved_config
from config.schema import Config

OF_THE_COMMAND = ("run", "run_dir", "step", "logging", "hydra")
WHERE = ("device", "model.name", "train_model.num_threads")
"""Settings of the machine, which both objectives are computed with."""
OF_THE_OBJECTIVE = ("ref_model.name", "ref_model.dtype")
"""Settings beside `policy.*`: its reference, or its teacher."""
ONE_RANK = ("num_devices=1", "num_nodes=1", "shard_size=null", "devices=null")
NO_SCORERS = ("num_devices=null", "shard_size=null", "devices=null")
"""Of `ref_model`: the reference scores in this process."""


def configs(run_dir: Path, typed: list[str]) -> tuple[Config, Config | None]:
    """The recorded config for a learner in this process, and the same with the other objective, where one is typed.

    typed: overrides as on the command line: `policy=dr_grpo`, `policy.clip_epsilon_low=0.1`, `device=cpu`.

    Raises:
        ConfigError: one of them is of no objective; the message names it.
    """
    recorded = saved_config(run_dir)
    where = [f"train_model.{setting}" for setting in ONE_RANK] if recorded.train_model.ranks > 1 else []
    where += [f"ref_model.{setting}" for setting in NO_SCORERS] if recorded.ref_model.ranks else []
    preset: list[str] = []
    own: list[str] = []
    for override in typed:
        key, _, value = override.lstrip("+").partition("=")
        if key == "policy":
            preset = preset_changes(recorded.policy, value)
        elif key.startswith("policy.") or key in OF_THE_OBJECTIVE:
            own.append(f"{key}={value}")
        elif key in WHERE:
            where.append(f"{key}={value}")
        elif not key.startswith(OF_THE_COMMAND):
            raise ConfigError(
                f"run=replay {override}: the step is computed with the settings of its run; what may differ is the "
                f"objective (policy=NAME, policy.KEY=VALUE, {', '.join(OF_THE_OBJECTIVE)}) and {', '.join(WHERE)}"
            )
    changed = preset + own
    if not changed:
        return saved_config(run_dir, where), None
    other = saved_config(run_dir, where + changed)
    _check_teacher_prompt(recorded.policy, other.policy)
    return saved_config(run_dir, where), other


def _check_teacher_prompt(recorded: PolicyConfig, other: PolicyConfig) -> None:
    """Refuse prompts of a teacher that the ledger does not hold."""
    if other.teacher_prompt in (None, recorded.teacher_prompt):
        return
    if recorded.teacher_prompt is None:
        held, remedy = "no prompts of a teacher", "set policy.teacher_prompt=null"
    else:
        held = f"those of policy.teacher_prompt={recorded.teacher_prompt!r} alone"
        remedy = "leave the key out, or set it to null"
    raise ConfigError(
        f"run=replay policy.teacher_prompt={other.teacher_prompt!r}: what the teacher sees is read from the ledger of "
        f"the run, which holds {held}: {remedy}"
    )


def preset_changes(recorded: PolicyConfig, name: str) -> list[str]:
    """Settings that make the recorded objective what it would be, had its run been started with `policy=NAME`.

    What the run set by itself, on top of its own preset, stays.
    """
    before, after = preset(recorded.name), preset(name)
    new = after | {key: value for key, value in vars(recorded).items() if value != before[key]}
    new["name"] = name
    new["trust_regions"] = [
        region if isinstance(region, dict) else vars(region) for region in new["trust_regions"]
    ]
    return [f"policy.{key}={json.dumps(value)}" for key, value in new.items()]


def preset(name: str) -> dict[str, Any]:
    """Every field of an objective as the preset has it.

    Raises:
        ConfigError: there is none of this name.
    """
    path = PRESETS / f"{name}.yaml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        known = ", ".join(sorted(found.stem for found in PRESETS.glob("*.yaml")))
        raise ConfigError(f"policy={name}: no such preset; known: {known}")
    defaults = {field.name: vars(PolicyConfig())[field.name] for field in fields(PolicyConfig)}
    return defaults | (yaml.safe_load(path.read_text(encoding="utf-8")) or {})
