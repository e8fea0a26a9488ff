"""From where a run goes on: which checkpoint `train.resume` means, and which of its settings may be others by now.

    train.resume ──find──▶ a checkpoint ──changed_settings──▶ what changed: applied, each by name, or refused
    model.name=RUN or CHECKPOINT ──with_model──▶ a folder in Hugging Face format

What a checkpoint holds is in training/checkpoint.py.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.folders import holder
from config.schema import Config, LoraConfig, ModelConfig

DATE, TIME, JOB = r"\d{4}-\d\d-\d\d", r"\d\d-\d\d-\d\d(-\d+)?", r"\d+"
LANDING = {"outputs": "*/*", "multirun": "*/*/*"}
MODELS = "models"

BEGUN_WITH = (
    *(
        "env.dataset",
        "env.data_files",
        "env.split",
        "env.holdout",
        "env.duplicates",
        "env.mixture",
        "env.options",
    ),
    *("env.max_prompt_tokens", "env.system_prompt", "env.tools", "env.repeats"),
    *("train.seed", "train.epochs", "model.dtype", "optimizer.name"),
    *("train_model.lora.enabled", "train_model.lora.r", "train_model.lora.alpha"),
)
"""Settings that the saved state is of: the place in the data, the count of iterations, the optimizer's memory."""
UNSAID = ("run", "train.resume", "plan")
"""Settings that say nothing of the run."""
NO_PART_OF_IT = (
    *UNSAID,
    *("logging", "eval", "ray", "device", "ref_model"),
    *(
        "train.total_dialog_turns",
        "train.checkpoint_frequency",
        "train.keep_checkpoints",
        "train.wait_timeout_s",
    ),
    *("train_model.num_devices", "train_model.devices", "train_model.num_threads", "env.reward_workers"),
    *("inference_model.num_devices", "inference_model.devices", "inference_model.request_timeout_s"),
    "inference_model.start_timeout_s",
)
"""Settings that may differ between two runs that are the same one to `train.resume=auto`."""


MISSING = "absent"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a run goes on from."""

    path: Path
    state: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def find(config: Config, run_dir: Path, overlapped: bool) -> tuple[Saved | None, list[str]]:
    """What `train.resume` means, and what the user should know of it.

    That is a checkpoint, the newest one of a run's folder, or with `auto` of this very run: in this run's own folder
    (`hydra.run.dir=` names it), else of the newest run beside it that has the same config and is of the same script.
    An evaluation takes checkpoints of either script. None: start from the beginning.

    Raises:
        ConfigError: checkpoints are in the way of what would replace them; there is nothing to go on from, or only
            what the other script wrote.
    """
    from training.checkpoint import checkpoints

    given, own = config.train.resume, bool(checkpoints(run_dir))
    if own and config.run == "eval":
        raise ConfigError(
            f"hydra.run.dir={run_dir} is the folder of a training run, whose metrics an evaluation would replace; take "
            "another folder, and name this one with train.resume"
        )
    if own and given is None:
        raise ConfigError(
            f"hydra.run.dir={run_dir} holds the checkpoints of an earlier run, which this one would replace; go "
            "on from them with train.resume=auto, or take another folder"
        )
    if given is None:
        return None, []
    if given == "auto":
        saved, told = _newest(run_dir) if own else _among_siblings(config, run_dir, overlapped)
    else:
        saved, told = _given(Path(given))
    if saved is not None and config.run != "eval" and saved.state["overlapped"] != overlapped:
        ours, theirs = ("grpo_async.py", "grpo.py") if overlapped else ("grpo.py", "grpo_async.py")
        raise ConfigError(
            f"train.resume={saved.path}: {theirs} wrote it, which counts other iterations than {ours}; go on with "
            f"{theirs}"
        )
    return saved, told


def _given(path: Path, key: str = "train.resume") -> tuple[Saved, list[str]]:
    """A checkpoint, a run's folder or the folder of its checkpoints. key: the setting that names it."""
    try:
        return _at(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace("train.resume", key, 1)) from error


def _at(path: Path) -> tuple[Saved, list[str]]:
    from training.checkpoint import FOLDER, load_checkpoint

    if path.is_dir():
        return _newest(path.parent if path.name == FOLDER else path)
    return Saved(path, load_checkpoint(path)), []


def _newest(run_dir: Path) -> tuple[Saved, list[str]]:
    from training.checkpoint import load_newest

    path, state, passed_over = load_newest(run_dir)
    return Saved(path, state), [f"passed over, as it cannot be read: {reason}" for reason in passed_over]


def _among_siblings(config: Config, run_dir: Path, overlapped: bool) -> tuple[Saved | None, list[str]]:
    from training.checkpoint import checkpoints, origin

    nearest = ""
    for folder in _newest_first(siblings(run_dir)):
        known = next((found for path in checkpoints(folder) if (found := origin(path)) is not None), None)
        if known is None:
            nearest = nearest or f"; none of the checkpoints in {folder} can be read"
            continue
        if known[1] != overlapped and config.run != "eval":
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


def _newest_first(folders: list[Path]) -> list[Path]:
    from training.checkpoint import newest_checkpoint

    newest = ((newest_checkpoint(folder), folder) for folder in folders)
    dated = ((path.stat().st_mtime_ns, folder) for path, folder in newest if path is not None)
    return [folder for _, folder in sorted(dated, reverse=True)]


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
        old, new = (_comparable(side.get(key, MISSING)) for side in (before, now))
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(Change(f"{prefix}{key}", old, new))
    return found


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def under(key: str, settings: tuple[str, ...]) -> bool:
    return any(key == setting or key.startswith(f"{setting}.") for setting in settings)


def changed_settings(saved: Saved, config: Config, overlapped: bool) -> list[str]:
    """A line for every setting that is another than the checkpoint's, all of which take effect.

    Raises:
        ConfigError: one of them cannot; the message names each that cannot.
    """
    before = saved.state["config"]
    found = [change for change in changes(before, asdict(config)) if not under(change.key, UNSAID)]
    fixed = [change for change in found if under(change.key, BEGUN_WITH)]
    fixed += _counts(before, config, overlapped)
    if list(before["optimizer"]["group_lr"]) != list(config.optimizer.group_lr):
        fixed += [change for change in found if under(change.key, ("optimizer.group_lr",))]
    if fixed:
        raise ConfigError(
            f"train.resume={saved.path}: a run keeps what it began with: {'; '.join(map(str, fixed))}. Give these as "
            f"they were, or begin another run from its weights: model.name={saved.path} without train.resume"
        )
    total = config.total_optimizer_batches if overlapped else config.total_iterations
    if total < saved.state["iteration"]:
        raise ConfigError(
            f"train.resume={saved.path}: it has done {saved.state['iteration']} iterations, and "
            f"train.total_dialog_turns={config.train.total_dialog_turns} makes {total}: raise it, or go on from an "
            "earlier checkpoint"
        )
    return [f"{change} applied" for change in found]


def _counts(before: dict[str, Any], config: Config, overlapped: bool) -> list[Change]:
    """The sizes by which iterations and versions are counted, wherever they come from."""
    train, env = before["train"], before["env"]
    iteration = train["dialog_turns_per_batch"] or env["num_envs"] * env["repeats"]
    step = train["optim_batch_size"] or iteration
    pairs = [
        ("completions of an iteration", iteration, config.completions_per_iteration),
        ("completions of an optimizer step", step, config.optim_batch_size),
    ]
    if overlapped:
        per_version = -(-train["weight_update_frequency"] // train["epochs"])
        pairs.append(("batches between two pushes", per_version, config.batches_per_version))
    keys = {
        "completions of an iteration": "env.num_envs, train.dialog_turns_per_batch",
        "completions of an optimizer step": "train.optim_batch_size",
        "batches between two pushes": "train.weight_update_frequency",
    }
    return [Change(f"{what} ({keys[what]})", old, new) for what, old, new in pairs if old != new]


def is_checkpoint(name: str) -> bool:
    """Whether `model.name` names a checkpoint, a run's folder, or what was made of one."""
    path = Path(name)
    return path.suffix == ".pt" or (path / "checkpoints").is_dir()


def model_of(saved: Saved) -> ModelConfig:
    return ModelConfig(**saved.state["config"]["model"])


def with_model(config: Config) -> tuple[Config, list[str]]:
    """The config, with a folder in Hugging Face format for a `model.name` that is a checkpoint or a run's folder.

    That folder is made beside the checkpoint, RUN/models/NAME, once: a resumed run finds it again. A plan, which
    loads nothing, takes the model that the checkpoint's run began from.
    """
    from plan.model_shape import model_path

    name = config.model.name
    if not is_checkpoint(name) or (Path(model_path(name)) / "config.json").is_file():
        return config, []
    path = Path(name)
    folder = path.parent.parent / MODELS / path.stem
    if path.suffix == ".pt" and not path.exists() and folder.is_dir():
        return _named(config, folder), []
    saved, told = _given(path, "model.name")
    if config.run == "plan":
        return _named(config, Path(model_of(saved).name)), told
    folder = saved.run_dir.resolve() / MODELS / saved.path.stem
    if not folder.is_dir():
        with _made_beside(folder) as unfinished:
            write_model(saved, model_of(saved), unfinished)
    return _named(config, folder), [*told, f"model.name: the weights of {saved.path}, in {folder}"]


def _named(config: Config, name: Path | str) -> Config:
    return replace(config, model=replace(config.model, name=str(name)))


@contextmanager
def _made_beside(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `folder` at the end; another that did so first is as good."""
    folder.parent.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_model(saved: Saved, model: ModelConfig, folder: Path) -> None:
    """The checkpoint's policy in Hugging Face format, adapters merged in, as it goes to engines.

    Raises:
        ConfigError: the checkpoint is of another model than `model`.
    """
    import torch

    from training.model import add_lora, causal_model, load_model, load_tokenizer
    from training.trained import base_digest, load_trained, save_model
    from training.weights import made, named_weights

    tokenizer = load_tokenizer(model.name)
    lora = LoraConfig(**saved.state["config"]["train_model"]["lora"])
    loaded = load_model(model, [torch.device("cpu")])
    policy = add_lora(loaded, lora) if lora.enabled else loaded
    try:
        load_trained(policy, saved.state["learner"], base_digest(policy))
    except ConfigError as error:
        raise ConfigError(f"{saved.path} with model.name={model.name}: {error}") from error
    save_model(causal_model(policy), made(named_weights(policy)), tokenizer, folder)


@contextmanager
def evaluated_model(config: Config, run_dir: Path, overlapped: bool) -> Iterator[tuple[Config, Saved | None]]:
    """For `run=eval`: the config with the checkpoint of `train.resume` as its model, in a folder that is removed.

    Raises:
        ConfigError: there is no such checkpoint, or it is of another model than `model.name`.
    """
    saved, told = find(config, run_dir, overlapped)
    if saved is None and is_checkpoint(config.model.name):
        saved, told = _given(Path(config.model.name), "model.name")
        config = _named(config, model_of(saved).name)
    if saved is None:
        yield config, None
        return
    for line in told:
        print(line, file=sys.stderr)
    model = replace(config.model, dtype=model_of(saved).dtype)
    with tempfile.TemporaryDirectory(prefix=".model.", dir=run_dir) as folder:
        write_model(saved, model, Path(folder))
        print(f"evaluating {saved.path.name} of {saved.run_dir}", file=sys.stderr)
        yield _named(config, folder), saved
