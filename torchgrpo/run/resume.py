"""From where a run goes on: which checkpoint `train.resume` means, and which of its settings may be others by now.

    train.resume ──find──▶ a checkpoint ──changed_settings──▶ what changed: applied, each by name, or refused

What a checkpoint holds is in training/checkpoint.py; run/checkpoint_model.py makes a model of one.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.run_folder.checkpoints import FOLDER, checkpoints, is_checkpoint, newest_checkpoint
from config.run_folder.folders import holder
from config.schema.config import Config
from config.schema.errors import ConfigError
from torchgrpo.run.overlapped import ScheduleType

if TYPE_CHECKING:  # torch costs seconds
    from envs.prompts import PromptQueue
    from torchgrpo.training.checkpoint import Saved

DATE, TIME, JOB = r"\d{4}-\d\d-\d\d", r"\d\d-\d\d-\d\d(-\d+)?", r"\d+"
LANDING = {"outputs": "*/*", "multirun": "*/*/*"}

BEGUN_WITH = (
    *("env.dataset", "env.split", "env.holdout", "env.duplicates", "env.mixture"),
    *("env.curriculum.column", "env.curriculum.order", "env.curriculum.bins"),
    *("env.options", "env.max_prompt_tokens", "env.system_prompt", "env.tools", "env.repeats"),
    *("train.seed", "train.epochs", "model.dtype", "optimizer.name"),
    *("train_model.lora.enabled", "train_model.lora.r", "train_model.lora.alpha"),
    *("train_model.lora.quantization", "ref_model.name", "ref_model.dtype"),
)
"""Settings that the saved state is of: the place in the data, the count of iterations, the optimizer's memory."""
UNSAID = (*("run", "run_dir", "train.resume", "plan", "checkpoint", "to", "hub"), *("step", "rollouts"))
"""Settings that say nothing of the run."""
NO_PART_OF_IT = (
    *UNSAID,
    *("logging", "eval", "ray", "device"),
    *("ref_model.num_devices", "ref_model.devices", "ref_model.shard_size"),
    *("train.total_dialog_turns", "train.checkpoint_frequency", "train.keep_checkpoints"),
    *("train.keep_best", "train.export"),
    *("train.async_checkpoint", "train.restarts", "train.wait_timeout_s", "inference_model.start_timeout_s"),
    *("train_model.num_devices", "train_model.num_nodes", "train_model.shard_size", "train_model.offload"),
    *("train_model.devices", "train_model.num_threads", "env.reward_workers"),
    *("inference_model.num_devices", "inference_model.devices", "inference_model.request_timeout_s"),
)
"""Settings that may differ between two runs that are the same one to `train.resume=auto`."""
MISSING = "absent"


def starting_point(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> tuple["Saved | None", list[str]]:
    """The checkpoint that a training run goes on from, and what the user should know of it.

    Raises:
        ConfigError: as `find` and `changed_settings`.
    """
    saved, told = find(config, run_dir, schedule)
    return saved, told if saved is None else told + changed_settings(saved, config, schedule)


def find(config: Config, run_dir: Path, schedule: type[ScheduleType]) -> tuple["Saved | None", list[str]]:
    """What `train.resume` means, and what the user should know of it.

    That is a checkpoint, the newest one of a run's folder, or with `auto` of this very run: in this run's own folder
    (`hydra.run.dir=` names it), else of the newest run beside it that has the same config and is of the same script.
    An evaluation takes checkpoints of either script. None: start from the beginning.

    Raises:
        ConfigError: checkpoints are in the way of what would replace them; there is nothing to go on from, or only
            what the other script wrote.
    """
    named, own = config.train.resume, bool(checkpoints(run_dir))
    if own and config.run == "eval":
        raise ConfigError(
            f"hydra.run.dir={run_dir} is the folder of a training run, whose metrics an evaluation would replace; take "
            "another folder, and name this one with train.resume"
        )
    if own and named is None:
        raise ConfigError(
            f"hydra.run.dir={run_dir} holds the checkpoints of an earlier run, which this one would replace; go "
            "on from them with train.resume=auto, or take another folder"
        )
    if named is None:
        return None, []
    if named == "auto":
        saved, told = _newest(run_dir) if own else _among_siblings(config, run_dir, schedule)
    else:
        saved, told = given(Path(named))
    if saved is not None and config.run != "eval" and saved.state["overlapped"] != schedule.overlapped:
        raise ConfigError(
            f"train.resume={saved.path}: {schedule.other_script} wrote it, which counts other iterations than "
            f"{schedule.script}; go on with {schedule.other_script}"
        )
    return saved, told


def given(path: Path, key: str = "train.resume") -> tuple["Saved", list[str]]:
    """A checkpoint, a run's folder or the folder of its checkpoints. key: the setting that names it."""
    from torchgrpo.training.checkpoint import Saved, load_checkpoint

    try:
        if path.is_dir() and not is_checkpoint(path):
            return _newest(path.parent if path.name == FOLDER else path)
        path = path.resolve() if path.is_symlink() else path
        return Saved(path, load_checkpoint(path)), []
    except ConfigError as error:
        raise ConfigError(str(error).replace("train.resume", key, 1)) from error


def _newest(run_dir: Path) -> tuple["Saved", list[str]]:
    from torchgrpo.training.checkpoint import Saved, load_newest

    path, state, passed_over = load_newest(run_dir)
    return Saved(path, state), [f"passed over, as it cannot be read: {reason}" for reason in passed_over]


def _among_siblings(
    config: Config, run_dir: Path, schedule: type[ScheduleType]
) -> tuple["Saved | None", list[str]]:
    from torchgrpo.training.checkpoint import origin

    nearest = ""
    newest = ((newest_checkpoint(folder), folder) for folder in siblings(run_dir))
    dated = ((path.stat().st_mtime_ns, folder) for path, folder in newest if path is not None)
    for _, folder in sorted(dated, reverse=True):
        known = next((found for path in checkpoints(folder) if (found := origin(path)) is not None), None)
        if known is None:
            nearest = nearest or f"; none of the checkpoints in {folder} can be read"
            continue
        if known[1] != schedule.overlapped and config.run != "eval":
            continue
        different = [
            change for change in changes(known[0], asdict(config)) if not under(change.key, NO_PART_OF_IT)
        ]
        owner = holder(folder)
        if not different and owner is None:
            saved, told = _newest(folder)
            return saved, [*told, f"train.resume=auto takes {saved.path}"]
        why = f"is at work ({owner})" if owner else f"differs in {', '.join(map(str, different[:4]))}"
        nearest = nearest or f"; {folder} {why}: train.resume={folder} would go on from it"
    looked = " and ".join(str(root / pattern) for root, pattern in places(run_dir)) or str(run_dir)
    text = f"train.resume=auto: no checkpoint of this run in {looked}{nearest}"
    if config.run == "eval":
        raise ConfigError(f"{text}; give train.resume a checkpoint or the folder of a run")
    return None, [f"{text}; starting from the beginning"]


def places(run_dir: Path) -> list[tuple[Path, str]]:
    """Where runs like this one land: folders, and the pattern of the runs in them. None for a folder that was named by
    hand: another one beside it is another run, whatever its settings are."""
    parts = run_dir.resolve().parts
    for length, names in ((3, (DATE, TIME, JOB)), (2, (DATE, TIME))):
        if len(parts) > length and all(map(re.fullmatch, names, parts[-length:])):
            root = Path(*parts[:-length])
            beside = [(root.parent / name, depth) for name, depth in LANDING.items() if name != root.name]
            return [(root, "/".join("*" * length)), *beside]
    return [(run_dir.resolve().parent, "*")] if re.search(TIME, parts[-1]) else []


def siblings(run_dir: Path) -> list[Path]:
    """Folders of other runs beside this one, of sweeps too."""
    found = {folder for root, pattern in places(run_dir) for folder in root.glob(pattern)}
    return sorted(found - {run_dir.resolve()})


@dataclass(frozen=True)
class Change:
    """A setting that is another than it was."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[Change]:
    """Every setting that differs, by its dotted key; a section that only one side has is one."""
    found: list[Change] = []
    for key in dict.fromkeys([*before, *now]):
        old, new = (side.get(key, MISSING) for side in (before, now))
        old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(Change(f"{prefix}{key}", old, new))
    return found


def under(key: str, settings: tuple[str, ...]) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def changed_settings(saved: "Saved", config: Config, schedule: type[ScheduleType]) -> list[str]:
    """A line for every setting that is another than the checkpoint's, all of which take effect.

    Raises:
        ConfigError: one of them cannot; the message names each that cannot.
    """
    before = saved.state["config"]
    found = [change for change in changes(before, asdict(config)) if not under(change.key, UNSAID)]
    # What the checkpoint does not know and the config leaves unset is the same.
    differing = [change for change in found if change.before != MISSING or change.now is not None]
    fixed = [change for change in differing if under(change.key, BEGUN_WITH)]
    fixed += _counts(before, config, schedule)
    if list(before["optimizer"]["group_lr"]) != list(config.optimizer.group_lr):
        fixed += [change for change in found if under(change.key, ("optimizer.group_lr",))]
    if fixed:
        raise ConfigError(
            f"train.resume={saved.path}: a run keeps what it began with: {'; '.join(map(str, fixed))}. Give these as "
            f"they were, or begin another run from its weights: model.name={saved.path} without train.resume"
        )
    total = schedule.total(config)
    if total < saved.state["iteration"]:
        raise ConfigError(
            f"train.resume={saved.path}: it has done {saved.state['iteration']} iterations, and "
            f"train.total_dialog_turns={config.train.total_dialog_turns} makes {total}: raise it, or go on from an "
            "earlier checkpoint"
        )
    return [f"{change} applied" for change in differing]


def check_data(saved: "Saved | None", prompts: "PromptQueue") -> "PromptQueue":
    """The prompts themselves.

    Raises:
        ConfigError: they are made of other data than those of the checkpoint.
    """
    if saved is not None:
        try:
            prompts.source.changes(saved.state["prompts"]["source"])
        except ConfigError as error:
            raise ConfigError(f"train.resume={saved.path}: {error}") from error
    return prompts


def _counts(before: dict[str, Any], config: Config, schedule: type[ScheduleType]) -> list[Change]:
    """The sizes by which iterations and versions are counted, wherever they come from."""
    train, env = before["train"], before["env"]
    iteration = train["dialog_turns_per_batch"] or env["num_envs"] * env["repeats"]
    step = train["optim_batch_size"] or iteration
    iterations = "completions of an iteration (env.num_envs, train.dialog_turns_per_batch)"
    counts = [
        Change(iterations, iteration, config.completions_per_iteration),
        Change("completions of an optimizer step (train.optim_batch_size)", step, config.optim_batch_size),
    ]
    if schedule.overlapped:
        per_version = -(-train["weight_update_frequency"] // train["epochs"])
        pushes = "batches between two pushes (train.weight_update_frequency)"
        counts.append(Change(pushes, per_version, config.batches_per_version))
    return [change for change in counts if change.before != change.now]
