"""Tests `run=export`, `train.keep_best`, and failures during the export of a model."""

import json
import os
import shutil
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import grpo
from config.cli.changed_settings import changed_overrides
from config.cli.composition import register_schema
from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.script_runner import (
    ENVIRONMENT,
    ROOT,
    compose_run_config,
    find_callback,
    read_metrics,
    run_python,
    run_script,
    start_script,
    wait_until,
)
from torchgrpo.run.callbacks import EvaluationCallback
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep_run import LockstepRun
from torchgrpo.run.model_card import model_card

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=1")
SETS = "eval.sets={sums:{dataset:arithmetic,n:1,limit:8}}"


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def export(tmp_path: Path, *overrides: str) -> None:
    (tmp_path / "own").mkdir(exist_ok=True)
    run_job(compose_run_config("run=export", *overrides), tmp_path / "own", grpo.train, LockstepRun)
    assert not (tmp_path / "own").exists()


def test_models_go_with_their_checkpoints(lockstep_run: Path) -> None:
    assert file_names(lockstep_run / "models") == file_names(lockstep_run / "checkpoints")
    assert len(file_names(lockstep_run / "models")) == 2
    assert os.readlink(lockstep_run / "model") == "models/checkpoint_000004"


def test_the_card_says_what_it_is_and_its_command_gives_the_settings_again(lockstep_run: Path) -> None:
    card = (lockstep_run / "model" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["grpo", "reinforcement-learning"]
    last = read_metrics(lockstep_run)[-1]
    assert f"| held_out | 4 | 4 | {last['eval/held_out/pass@1']:.3f} [{last['eval/held_out/pass@1_low']:.3f}," in body
    assert (
        f"| 4 | {[row for row in read_metrics(lockstep_run) if 'reward/mean' in row][3]['reward/mean']:.3f} |" in body
    )
    assert "python grpo.py --config-name base" in body and "checkpoint_frequency=2" in body


@pytest.mark.parametrize(("env", "names_text", "datasets"), [
    ({"dataset": "gsm8k"}, "`gsm8k`", ["openai/gsm8k"]),
    ({"dataset": "gsm8k", "data_files": {"train": "mine.jsonl"}}, "`gsm8k`", None),
    ({"dataset": "arithmetic", "mixture": {"gsm8k": 1}}, "`arithmetic`", None),
    ({"dataset": "mixture", "mixture": {"gsm8k": 1, "dapo_math": {"weight": 2}, "arithmetic": 1}},
     "`gsm8k` and `dapo_math` and `arithmetic`", ["openai/gsm8k", "BytedTsinghua-SIA/DAPO-Math-17k"]),
    ({"dataset": "mixture", "mixture": {"algebra": {"dataset": "gsm8k"}, "more": {"dataset": "gsm8k"}}},
     "`algebra` and `more`", ["openai/gsm8k"]),
    ({"dataset": "mixture", "mixture": {"math": {"dataset": "jsonl", "data_files": {"train": "mine.jsonl"}}}},
     "`math`", None),
])  # fmt: skip
def test_the_card_names_what_the_data_was(env: dict[str, Any], names_text: str, datasets: list[str] | None) -> None:
    config = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Config), {"env": env, "model": {"name": "m"}}))
    state = {"config": config, "learner": {"optimizer_steps": 1}, "iteration": 1, "overlapped": False}
    _, head, body = model_card(state, []).split("---\n", 2)
    assert yaml.safe_load(head).get("datasets") == datasets
    assert f"reinforcement learning on {names_text}, " in body


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "config").glob("grpo_*.yaml")))
def test_the_differences_of_a_config_give_it_again(name: str) -> None:
    import shlex
    from dataclasses import asdict

    from hydra import compose, initialize_config_dir

    from config.cli.composition import to_config

    register_schema()
    more_overrides = (SETS, "env.system_prompt='Be \"brief\", please: one = {word}'", "logging.experiment_name='true'")
    config = asdict(compose_run_config(*more_overrides, name=name))
    overrides = [word for text in changed_overrides(config) for word in shlex.split(text)]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        again = asdict(to_config(compose("base", overrides=overrides)))
    assert again == config


@pytest.mark.parametrize("source_kind", ["the run", "a checkpoint", "made anew"])
def test_an_exported_folder_is_a_model(lockstep_run: Path, source_kind: str, tmp_path: Path) -> None:
    checkpoint = lockstep_run / "checkpoints" / "checkpoint_000002"
    source = lockstep_run if source_kind == "the run" else checkpoint
    if source_kind == "made anew":
        source = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "kept")
    export(tmp_path, f"export.checkpoint={source}", f"export.to={tmp_path / 'new' / 'model'}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "model").state_dict()
    number = 4 if source_kind == "the run" else 2
    of_run = AutoModelForCausalLM.from_pretrained(lockstep_run / "models" / f"checkpoint_{number:06d}")
    assert all((tensor == model[name]).all() for name, tensor in of_run.state_dict().items())
    assert file_names(tmp_path / "new") == ["model"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("export.to=new",), "run=export without export.checkpoint"),
        (("export.checkpoint={run}",), "run=export without export.to: set the output folder"),
        (("export.checkpoint=nowhere", "export.to=new"), "export.checkpoint=nowhere: no such folder"),
        (("export.checkpoint={run}/models", "export.to=new"), "the folder has no checkpoints/checkpoint_*"),
        (("export.checkpoint={run}", "export.to={run}"), "the folder is not empty"),
        (
            ("export.checkpoint={run}", "export.to=new", "export.hub=me"),
            "export.hub=me is not a valid hub model name",
        ),
        (
            ("export.checkpoint={run}", "export.to=new", "export.hub=me/model"),
            "export.hub=me/model: no token for the hub",
        ),
    ],
)
def test_what_cannot_be_exported(
    lockstep_run: Path, overrides: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError) as raised:
        export(tmp_path, *(text.format(run=lockstep_run) for text in overrides))
    assert expected in str(raised.value)
    assert not Path("new").exists()


def test_a_place_that_takes_no_model_is_one_message(lockstep_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    to = tmp_path / "file" / "new"
    with pytest.raises(ConfigError, match=rf"export.to={to}: the model could not be written there \(.*File exists\)"):
        export(tmp_path, f"export.checkpoint={lockstep_run}", f"export.to={to}")


def test_a_model_is_exported_from_a_read_only_run(lockstep_run: Path, tmp_path: Path) -> None:
    """An export from read-only folders is writable.

    With the modes of the source only root could write a card into the copy, or remove the copy.
    """
    archive = shutil.copytree(lockstep_run, tmp_path / "archive")
    for path in (*archive.rglob("*"), archive):
        path.chmod(0o555 if path.is_dir() else 0o444)
    export(tmp_path, f"export.checkpoint={archive}", f"export.to={tmp_path / 'new'}")
    copied = [tmp_path / "new", *(tmp_path / "new").iterdir()]
    assert len(copied) > 3 and all(path.stat().st_mode & stat.S_IWUSR for path in copied)


def test_where_the_model_has_moved_it_is_named_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved base model is named again for the export of an adapter.

    The run has not exported the model itself.
    """
    base = shutil.copytree(ROOT / "torchgrpo" / "models" / "quickstart", tmp_path / "base")
    lora = ("train_model.lora.enabled=true", "train.export=false", "train.total_dialog_turns=16")
    run_job(compose_run_config(*SMALL, *lora, f"model.name={base}"), tmp_path / "run", grpo.train, LockstepRun)
    assert not (tmp_path / "run" / "models").exists() and not (tmp_path / "run" / "model").is_symlink()
    base.rename(tmp_path / "moved")
    overrides = (f"export.checkpoint={tmp_path / 'run'}", f"export.to={tmp_path / 'new'}")
    with pytest.raises(ConfigError, match=rf"started from the model {base}, which does not exist.*model\.name="):
        export(tmp_path, *overrides)
    model_override = f"model.name={tmp_path / 'moved'}"
    monkeypatch.setattr("torchgrpo.run.jobs.export.typed_overrides", lambda: [*overrides, model_override])
    export(tmp_path, *overrides, model_override)
    assert {"adapter", "model.safetensors"} <= set(file_names(tmp_path / "new"))


class FakeHub(BaseHTTPRequestHandler):
    """Fake hub for uploads, which records the files of the commit."""

    files: dict[str, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        host = f"http://{self.headers['Host']}/me/model"
        answer: dict[str, Any] = {"url": host, "commitUrl": f"{host}/commit/1"}
        answer |= {"commitOid": "1", "pullRequestUrl": None}
        if "preupload" in self.path:
            files = json.loads(body)["files"]
            answer = {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "oid": None, "shouldIgnore": False}
                    for file in files
                ]
            }
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            type(self).files = {file["path"]: len(file["content"]) for file in files}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/model", "sha": "0", "siblings": [], "type": "user", "name": "me"})

    def _answer(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize("hub_answers", [True, False], ids=["hub", "no hub"])
def test_a_folder_is_uploaded(lockstep_run: Path, hub_answers: bool, tmp_path: Path) -> None:
    """The upload goes to a fake hub on this machine, or fails without a hub."""
    FakeHub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not hub_answers:
        server.shutdown()
        server.server_close()
    environment = {**ENVIRONMENT, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = ("grpo.py", "--config-name", "grpo_quickstart", "run=export", f"export.checkpoint={lockstep_run}")
    done = run_python([*command, f"export.to={tmp_path / 'to'}", "export.hub=me/model"], environment=environment)
    assert file_names(tmp_path / "to") == file_names(lockstep_run / "model")
    if hub_answers:
        assert done.returncode == 0, done.stderr
        assert set(FakeHub.files) == set(file_names(tmp_path / "to")) and "uploaded to me/model" in done.stdout
        server.shutdown()
    else:
        assert done.returncode == 2 and "export.hub=me/model: the upload failed" in done.stderr


def test_the_best_stays_and_a_resumed_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the best evaluation stays, whatever follows.

    Evaluations give 0.5, 0.1, 0.9 (after iteration 2), 0.3, 0.9, 0.2 and so on; the first 0.9 is the best.
    """
    values = iter([0.5, 0.1, 0.9, 0.3, 0.9, 0.2, 0.2, 0.4])

    def run(working: LockstepRun) -> None:
        evaluation = find_callback(working, EvaluationCallback).evaluation

        def fake_evaluation(iteration: int, is_stopped: Any) -> Any:
            value, key = next(values), "eval/sums/pass@1"
            ends = {f"{key}_low": 0.0, f"{key}_high": 1.0, "eval/sums/problems": 8.0}
            return {key: value, **ends}, [""]

        evaluation.run = fake_evaluation  # type: ignore[method-assign]
        grpo.train(working)

    overrides = (*SMALL, SETS, "train.keep_best=eval/sums/pass@1", "train.keep_checkpoints=1", "eval.frequency=1")
    run_job(compose_run_config(*overrides), tmp_path, run, LockstepRun)
    assert file_names(tmp_path / "checkpoints") == ["best", "checkpoint_000002", "checkpoint_000004"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == "checkpoint_000002"
    assert os.readlink(tmp_path / "models" / "best") == "checkpoint_000002"
    resume_overrides = ("train.resume=auto", "train.total_dialog_turns=112")
    run_job(compose_run_config(*overrides, *resume_overrides), tmp_path, run, LockstepRun)
    assert file_names(tmp_path / "models") == ["best", "checkpoint_000002", "checkpoint_000007"]
    export(tmp_path, f"export.checkpoint={tmp_path}/checkpoints/best", f"export.to={tmp_path / 'best'}")
    assert "after 2 optimizer steps" in (tmp_path / "best" / "README.md").read_text()


def test_an_evaluation_that_is_the_best_is_followed_by_a_checkpoint(tmp_path: Path) -> None:
    overrides = ("train.keep_best=eval/sums/score", "train.checkpoint_frequency=0", "eval.frequency=1")
    run_job(compose_run_config(*SMALL[:3], SETS, *overrides), tmp_path, grpo.train, LockstepRun)
    best = max((row["eval/sums/score"], -row["iteration"]) for row in read_metrics(tmp_path)[1:] if "iteration" in row)
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"checkpoint_{-best[1]:06d}"


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keep_best=eval/sums/pass@2: .* choose one of eval/sums/pass@1, eval/"):
        compose_run_config(SETS, "train.keep_best=eval/sums/pass@2")
    with pytest.raises(ConfigError, match=r"set eval\.sets, whose metrics"):
        compose_run_config("train.keep_best=eval/sums/pass@1")


def test_a_full_disk_in_the_middle_of_a_model_leaves_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchgrpo.training import model_writer, safetensors_writer

    def full(folder: Path, *arguments: Any, **options: Any) -> None:
        safetensors_writer.write_safetensors(folder, *arguments, **options)
        if "000003" in folder.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_writer, "write_safetensors", full)
    overrides = (*SMALL[:2], "train.total_dialog_turns=48", "train.checkpoint_frequency=1")
    run_job(compose_run_config(*overrides, "train.keep_checkpoints=1"), tmp_path, grpo.train, LockstepRun)
    assert file_names(tmp_path / "checkpoints") == ["checkpoint_000003"]
    assert file_names(tmp_path / "models") == ["checkpoint_000002"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    output = capsys.readouterr().err
    assert "checkpoint_000003 is complete, but its model was not written" in output and "No space left" in output


@pytest.mark.long
def test_a_run_killed_in_the_middle_of_a_model_loses_nothing(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "slow.py", tmp_path / "run"
    script.write_text(
        f"import runpy, sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import torchgrpo.training.model_writer as models\n"
        "write = models.write_safetensors\n"
        "def slow(folder, *arguments, **options):\n"
        "    write(folder, *arguments, **options)\n"
        "    if '000003' in folder.name:\n"
        "        time.sleep(1000)\n"
        "models.write_safetensors = slow\n"
        "runpy.run_path('grpo.py', run_name='__main__')\n"
    )
    process = start_script(str(script), run_dir, *SMALL, "train.keep_checkpoints=1")
    models = run_dir / "models"
    wait_until(lambda: any(models.glob("checkpoint_000003.*.tmp/model.safetensors")), process)
    process.kill()
    process.communicate()
    assert file_names(run_dir / "checkpoints") == ["checkpoint_000003"]
    assert "checkpoint_000002" in file_names(models) and "checkpoint_000003" not in file_names(models)
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    again = run_script("grpo.py", run_dir, *SMALL, "train.keep_checkpoints=1", "train.resume=auto")
    output = again.output
    assert file_names(models) == ["checkpoint_000004"], output
    assert output.splitlines()[-3].startswith(f"model: {run_dir}/model")
    assert f"run=eval model.name={run_dir}/model" in output.splitlines()[-1]
