"""Former names of keys, values, metrics, events and ledger fields, with functions that replace them.

A former key or value is refused with its new name. The files of an earlier run are read under the new names.
"""

from collections.abc import Mapping
from typing import Any

KEYS = {
    "checkpoint": "export.checkpoint",
    "to": "export.to",
    "hub": "export.hub",
    "step": "replay.step",
    "env.samples": "rewards.completions",
    "env.reward_second_opinion": "env.fallback_reward",
    "policy.reward_parts": "policy.reward_components",
    "policy.count_dropped": "policy.masked_in_denominator",
    "policy.limit_is_truncated": "policy.treat_max_len_as_truncated",
    "policy.read_padding": "policy.include_padding",
    **{
        f"plan.{name}": f"machine.{name}"
        for name in [
            "gpus",
            "gpu_memory_gib",
            "nodes",
            "host_memory_gib",
            "disk_gib",
            "gpu_tflops",
            "gpu_bandwidth_gib_s",
            "link_gib_s",
            "network_gib_s",
        ]
    },
}
"""By the former key of the configuration."""
MEMBER_KEYS = {"reward_second_opinion": "fallback_reward"}
"""Fields of a member of `env.mixture`."""
VALUES = {
    "run": {"rehearse": "dry_run", "doctor": "diagnostics"},
    "train.on_alarm": {"say": "log"},
    "train.on_mismatch": {"say": "log"},
    "policy.reward_components": {"together": "combined", "apart": "separate"},
    "policy.baseline": {"runner_up": "second_best"},
    "policy.filter_on": {"lead": "margin"},
}
"""By the present key, then by the former value."""
METRICS = {
    "prompts/most_drawn": "prompts/max_repeat_ratio",
    "prompts/left_out": "prompts/too_long",
    "prompts/repeated": "prompts/duplicates",
    "groups/repeats_question": "completions/prompt_echo",
    "loss/tokens_dropped": "loss/masked_fraction",
    "loss/environment": "loss/env_token_nll",
    "mismatch/gap": "logprob_diff/mean",
    "mismatch/p50": "logprob_diff/p50",
    "mismatch/p99": "logprob_diff/p99",
    "mismatch/max": "logprob_diff/max",
    "turns/drawn_tokens": "turns/sampled_tokens",
    "distill/size": "distill/abs_mean",
    "weight_check/largest": "weight_check/max",
    "reward/length": "reward/overlong_penalty",
}
EVENTS = {
    "begun": "start",
    "ended": "end",
    "pushed": "weight_push",
    "evaluated": "evaluation",
    "dropped": "stale_groups",
    "skipped": "skipped_step",
    "restarted": "restart",
    "resumed": "resume",
}
LEDGER_FIELDS = {"in_place_of": "replaces", "begun": "started_at", "drawn": "sampled_at", "judged": "scored_at"}
COMPLETION_FIELDS = {"sampled": "sampled_mask", "shown": "reward_input"}
"""Of each completion of a group in the ledger."""
VERDICT_FIELDS = {"parts": "components"}


def with_new_names(names: Mapping[str, str], record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record of an earlier run with the new names, in the same order."""
    if names.keys().isdisjoint(record):
        return record
    return {names.get(name, name): value for name, value in record.items()}


def new_value_of(key: str, value: object) -> str | None:
    """Returns the present name of a former value of `key`, or None."""
    return VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def with_new_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested settings of an earlier run with the new keys and values.

    If the settings have both a former key and its new key, the value of the new key is kept.
    """
    moved = {old: _pop(settings, old) for old in KEYS}
    for old, (found, value) in moved.items():
        section, _, name = KEYS[old].rpartition(".")
        if found:
            settings.setdefault(section, {}).setdefault(name, value)
    members = settings.get("env", {}).get("mixture") or {}
    for name, member in members.items():
        if isinstance(member, dict):
            members[name] = with_new_names(MEMBER_KEYS, member)
    for key in VALUES:
        section, _, name = key.rpartition(".")
        fields = settings.get(section, {}) if section else settings
        if isinstance(fields, dict) and (new := new_value_of(key, fields.get(name))):
            fields[name] = new
    return settings


def _pop(settings: dict[str, Any], key: str) -> tuple[bool, Any]:
    section, _, name = key.rpartition(".")
    fields = settings.get(section) if section else settings
    if not isinstance(fields, dict) or name not in fields:
        return False, None
    value = fields.pop(name)
    if section and not fields:
        del settings[section]
    return True, value
