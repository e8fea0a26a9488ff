"""Resolves `train.resume` to a checkpoint, and checks settings and data against that checkpoint.

    train.resume ──find_checkpoint──▶ checkpoint ──changed_settings──▶ a notice for each change, or ConfigError

training/checkpoint.py has the format of checkpoints; run/checkpoint_model.py writes models of checkpoints.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import CHECKPOINTS_FOLDER, checkpoints, is_checkpoint, newest_checkpoint
from config.run_folder.folders import lock_owner
from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.run.overlapped_run import ScheduleType

if TYPE_CHECKING:  # torch costs seconds
    from envs.prompts import PromptQueue
    from torchgrpo.training.checkpoint import Checkpoint

DATE, TIME, JOB = r"\d{4}-\d\d-\d\d", r"\d\d-\d\d-\d\d(-\d+)?", r"\d+"
SIBLING_PATTERNS = {"outputs": "*/*", "multirun": "*/*/*"}

FIXED_SETTINGS = (
    *("env.dataset", "env.split", "env.holdout", "env.duplicates", "env.mixture"),
    *("env.curriculum.column", "env.curriculum.order", "env.curriculum.bins"),
    *("env.options", "env.max_prompt_tokens", "env.system_prompt", "env.tools", "env.repeats"),
    *("env.environment", "env.environment_options", "env.tool_format", "env.tool_parser"),
    *("env.agent", "env.agent_columns"),
    *("env.history", "env.turn_ends"),
    *("train.seed", "train.epochs", "model.dtype", "model.chat_template_kwargs", "optimizer.name"),
    *("train_model.lora.enabled", "train_model.lora.r", "train_model.lora.alpha"),
    *("train_model.lora.quantization", "ref_model.name", "ref_model.dtype"),
)
"""Settings that a resumed run must not change.

They determine the data, the number of iterations, the trained parameters, the optimizer state and the reference model.
"""
IGNORED_SETTINGS = ("run", "run_dir", "train.resume", "machine", "rewards", "export", "replay", "rollouts")
"""Settings of a command, which do not belong to the training run; a difference is never reported."""
AUTO_IGNORED_SETTINGS = (
    *IGNORED_SETTINGS,
    *("logging", "eval", "ray", "device"),
    *("ref_model.num_devices", "ref_model.devices", "ref_model.shard_size"),
    *("train.total_dialog_turns", "train.checkpoint_frequency", "train.keep_checkpoints"),
    *("train.keep_best", "train.export"),
    *("train.async_checkpoint", "train.restarts", "train.wait_timeout_s", "inference_model.start_timeout_s"),
    *("train_model.num_devices", "train_model.num_nodes", "train_model.shard_size", "train_model.offload"),
    *("train_model.devices", "train_model.context_parallel", "train_model.num_threads"),
    *("env.reward_workers", "env.environment_workers"),
    *("env.judge.concurrency", "env.judge.requests_per_minute", "env.judge.retries", "env.judge.timeout_s"),
    *("env.judge.budget", "env.judge.cache", "env.judge.api_key_env"),
    *("env.reward_model.device", "env.reward_model.batch_size"),
    *("inference_model.num_devices", "inference_model.devices", "inference_model.request_timeout_s"),
)
"""Settings that `train.resume=auto` ignores when it looks for an earlier run with the same settings."""
ABSENT = "absent"
"""Value of a setting that one of two configs does not have."""


def resolve_resume(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> tuple["Checkpoint | None", list[str]]:
    """Returns the checkpoint that a training run resumes from, and notices for the user.

    Raises:
        ConfigError: as `find_checkpoint` and `changed_settings`.
    """
    checkpoint, notices = find_checkpoint(config, run_dir, schedule)
    return checkpoint, notices if checkpoint is None else notices + changed_settings(checkpoint, config, schedule)


def find_checkpoint(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> tuple["Checkpoint | None", list[str]]:
    """Returns the checkpoint that `train.resume` names, and notices for the user.

    `train.resume` is a checkpoint, a run's folder (its newest checkpoint), or `auto`. With `auto` the newest checkpoint
    of this run's own folder is taken (`hydra.run.dir=` names the folder), else that of the newest sibling run with the
    same config and the same script. An evaluation takes checkpoints of either script. None: start from the beginning.

    Raises:
        ConfigError: this run would overwrite checkpoints, no checkpoint was found, or the other script wrote it.
    """
    resume, has_own = config.train.resume, bool(checkpoints(run_dir))
    if has_own and config.run == "eval":
        raise ConfigError(
            f"hydra.run.dir={run_dir}: an evaluation would replace the metrics of this training run; set "
            "another hydra.run.dir, and name the training run with train.resume"
        )
    if has_own and resume is None:
        raise ConfigError(
            f"hydra.run.dir={run_dir}: this run would replace the checkpoints of an earlier run; resume that "
            "run with train.resume=auto, or set another hydra.run.dir"
        )
    if resume is None:
        return None, []
    if resume == "auto":
        checkpoint, notices = _load_newest(run_dir) if has_own else _find_in_siblings(config, run_dir, schedule)
    else:
        checkpoint, notices = load_named_checkpoint(Path(resume))
    if checkpoint is not None and config.run != "eval" and checkpoint.state["overlapped"] != schedule.is_overlapped:
        raise ConfigError(
            f"train.resume={checkpoint.path}: the checkpoint is from {schedule.other_script}, which counts "
            f"iterations differently from {schedule.script}; resume with {schedule.other_script}"
        )
    return checkpoint, notices


def load_named_checkpoint(path: Path, key: str = "train.resume") -> tuple["Checkpoint", list[str]]:
    """Loads the checkpoint at a path, and returns it with notices for the user.

    path: a checkpoint, a run's folder or its checkpoints/ folder. key: the setting to name in errors.

    Raises:
        ConfigError: no checkpoint at the path can be read.
    """
    from torchgrpo.training.checkpoint import Checkpoint, load_checkpoint

    try:
        if path.is_dir() and not is_checkpoint(path):
            return _load_newest(path.parent if path.name == CHECKPOINTS_FOLDER else path)
        path = path.resolve() if path.is_symlink() else path
        return Checkpoint(path, load_checkpoint(path)), []
    except ConfigError as error:
        raise ConfigError(str(error).replace("train.resume", key, 1)) from error


def _load_newest(run_dir: Path) -> tuple["Checkpoint", list[str]]:
    """Loads the newest readable checkpoint of a run, with notices about unreadable ones."""
    from torchgrpo.training.checkpoint import Checkpoint, load_newest_checkpoint

    path, state, skip_reasons = load_newest_checkpoint(run_dir)
    return Checkpoint(path, state), [f"skipped an unreadable checkpoint: {reason}" for reason in skip_reasons]


def _find_in_siblings(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> tuple["Checkpoint | None", list[str]]:
    """Finds the newest checkpoint of a sibling run with the same settings.

    Returns the checkpoint, or None where there is none, and notices for the user.
    """
    from torchgrpo.training.checkpoint import read_run_config

    nearest_hint = ""
    newest = ((newest_checkpoint(folder), folder) for folder in sibling_runs(run_dir))
    folders_by_time = ((path.stat().st_mtime_ns, folder) for path, folder in newest if path is not None)
    for _, folder in sorted(folders_by_time, reverse=True):
        saved_config = next(
            (found for path in checkpoints(folder) if (found := read_run_config(path)) is not None), None
        )
        if saved_config is None:
            nearest_hint = nearest_hint or f"; none of the checkpoints in {folder} can be read"
            continue
        if saved_config[1] != schedule.is_overlapped and config.run != "eval":
            continue
        different = [
            change
            for change in find_changes(saved_config[0], asdict(config))
            if not is_under(change.key, AUTO_IGNORED_SETTINGS)
        ]
        owner = lock_owner(folder)
        if not different and owner is None:
            checkpoint, notices = _load_newest(folder)
            return checkpoint, [*notices, f"train.resume=auto: resuming from {checkpoint.path}"]
        why = f"is in use ({owner})" if owner else f"differs in {', '.join(map(str, different[:4]))}"
        nearest_hint = nearest_hint or f"; {folder} {why}: set train.resume={folder} to resume from that run"
    searched_patterns = " and ".join(str(root / pattern) for root, pattern in sibling_patterns(run_dir)) or str(run_dir)
    text = f"train.resume=auto: no checkpoint of this run in {searched_patterns}{nearest_hint}"
    if config.run == "eval":
        raise ConfigError(f"{text}; give train.resume a checkpoint or the folder of a run")
    return None, [f"{text}; starting from the beginning"]


def sibling_patterns(run_dir: Path) -> list[tuple[Path, str]]:
    """Returns root folders and glob patterns of the runs beside a run's folder.

    Only folders that Hydra names by date and time have siblings: a folder named by hand is a run of its own, whatever
    the settings of the folders beside it are.
    """
    parts = run_dir.resolve().parts
    for length, names in ((3, (DATE, TIME, JOB)), (2, (DATE, TIME))):
        if len(parts) > length and all(map(re.fullmatch, names, parts[-length:])):
            root = Path(*parts[:-length])
            sibling_roots = [
                (root.parent / name, depth) for name, depth in SIBLING_PATTERNS.items() if name != root.name
            ]
            return [(root, "/".join("*" * length)), *sibling_roots]
    return [(run_dir.resolve().parent, "*")] if re.search(TIME, parts[-1]) else []


def sibling_runs(run_dir: Path) -> list[Path]:
    """Returns the folders of other runs beside a run's folder, jobs of sweeps included."""
    found = {folder for root, pattern in sibling_patterns(run_dir) for folder in root.glob(pattern)}
    return sorted(found - {run_dir.resolve()})


@dataclass(frozen=True)
class SettingChange:
    """One setting whose value differs between two configs."""

    key: str
    old_value: Any
    new_value: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old_value} -> {self.new_value}"


def find_changes(old_config: dict[str, Any], new_config: dict[str, Any], prefix: str = "") -> list[SettingChange]:
    """Returns every setting that differs between two configs, with its dotted key.

    A section that only one config has counts as one setting. An empty section is as good as none in the old config.
    """
    found: list[SettingChange] = []
    for key in dict.fromkeys([*old_config, *new_config]):
        old, new = (side.get(key, ABSENT) for side in (old_config, new_config))
        old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            found += find_changes(old, new, f"{prefix}{key}.")
        elif old != new and (old, new) != (ABSENT, {}):
            found.append(SettingChange(f"{prefix}{key}", old, new))
    return found


def is_under(key: str, settings: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of these settings or inside of one."""
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def changed_settings(checkpoint: "Checkpoint", config: Config, schedule: type[ScheduleType]) -> list[str]:
    """Checks settings that differ from the checkpoint's, and returns a notice for each.

    Raises:
        ConfigError: a resumed run must not change some of these settings; the message names each of them.
    """
    old_config = checkpoint.state["config"]
    found = [
        change for change in find_changes(old_config, asdict(config)) if not is_under(change.key, IGNORED_SETTINGS)
    ]
    # A setting that the checkpoint lacks and the config leaves unset has not changed.
    differing = [change for change in found if change.old_value != ABSENT or change.new_value is not None]
    fixed = [change for change in differing if is_under(change.key, FIXED_SETTINGS)]
    fixed += _changed_batch_sizes(old_config, config, schedule)
    if list(old_config["optimizer"]["group_lr"]) != list(config.optimizer.group_lr):
        fixed += [change for change in found if is_under(change.key, ("optimizer.group_lr",))]
    if fixed:
        raise ConfigError(
            f"train.resume={checkpoint.path}: a resumed run must keep these settings: "
            f"{'; '.join(map(str, fixed))}. Set them back, or start another run from these weights: "
            f"model.name={checkpoint.path} without train.resume"
        )
    total = schedule.total_iterations(config)
    if total < checkpoint.state["iteration"]:
        raise ConfigError(
            f"train.resume={checkpoint.path}: the checkpoint has done {checkpoint.state['iteration']} "
            f"iterations, and train.total_dialog_turns={config.train.total_dialog_turns} amounts to {total} "
            "iterations: raise train.total_dialog_turns, or resume from an earlier checkpoint"
        )
    return [f"{change} applied" for change in differing]


def check_data(checkpoint: "Checkpoint | None", prompts: "PromptQueue") -> "PromptQueue":
    """Checks that the prompts come from the checkpoint's data, and returns the prompts.

    Raises:
        ConfigError: the data differ.
    """
    if checkpoint is not None:
        try:
            prompts.source.compare_data(checkpoint.state["prompts"]["source"])
        except ConfigError as error:
            raise ConfigError(f"train.resume={checkpoint.path}: {error}") from error
    return prompts


def _changed_batch_sizes(
    old_config: dict[str, Any], config: Config, schedule: type[ScheduleType]
) -> list[SettingChange]:
    """Returns changes of the completions per iteration and step, and of batches per version."""
    train, env = old_config["train"], old_config["env"]
    iteration = train["dialog_turns_per_batch"] or env["num_envs"] * env["repeats"]
    step = train["optim_batch_size"] or iteration
    iterations = "completions of an iteration (env.num_envs, train.dialog_turns_per_batch)"
    counts = [
        SettingChange(iterations, iteration, config.completions_per_iteration),
        SettingChange("completions of an optimizer step (train.optim_batch_size)", step, config.optim_batch_size),
    ]
    if schedule.is_overlapped:
        per_version = -(-train["weight_update_frequency"] // train["epochs"])
        pushes = "batches between two pushes (train.weight_update_frequency)"
        counts.append(SettingChange(pushes, per_version, config.batches_per_version))
    return [change for change in counts if change.old_value != change.new_value]
