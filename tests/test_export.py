"""`run=export`, `train.keep_best`, and what a failure in the middle of a model leaves."""

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
from config.cli.composition import register_schema
from config.cli.differences import overrides
from config.schema.config import Config
from config.schema.errors import ConfigError
from tests.scripts import ENVIRONMENT, ROOT, callback_of, configured, ended, ran, rows, start, wait_for
from torchgrpo.run.callbacks import Evaluations
from torchgrpo.run.job import run_job
from torchgrpo.run.lockstep import Lockstep
from torchgrpo.run.model_card import model_card

SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64", "train.checkpoint_frequency=1")
SETS = "eval.sets={sums:{dataset:arithmetic,n:1,limit:8}}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def export(tmp_path: Path, *given: str) -> None:
    (tmp_path / "own").mkdir(exist_ok=True)
    run_job(configured("run=export", *given), tmp_path / "own", grpo.train, Lockstep)
    assert not (tmp_path / "own").exists()


def test_models_go_with_their_checkpoints(lockstep_run: Path) -> None:
    assert names(lockstep_run / "models") == names(lockstep_run / "checkpoints")
    assert len(names(lockstep_run / "models")) == 2
    assert os.readlink(lockstep_run / "model") == "models/checkpoint_000004"


def test_the_card_says_what_it_is_and_its_command_gives_the_settings_again(lockstep_run: Path) -> None:
    card = (lockstep_run / "model" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["grpo", "reinforcement-learning"]
    last = rows(lockstep_run)[-1]
    assert (
        f"| held_out | 4 | 4 | {last['eval/held_out/pass@1']:.3f} [{last['eval/held_out/pass@1_low']:.3f},"
        in body
    )
    assert (
        f"| 4 | {[row for row in rows(lockstep_run) if 'reward/mean' in row][3]['reward/mean']:.3f} |" in body
    )
    assert "python grpo.py --config-name base" in body and "checkpoint_frequency=2" in body


@pytest.mark.parametrize(("env", "named", "datasets"), [
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
def test_the_card_names_what_the_data_was(
    env: dict[str, Any], named: str, datasets: list[str] | None
) -> None:
    config = OmegaConf.to_container(
        OmegaConf.merge(OmegaConf.structured(Config), {"env": env, "model": {"name": "m"}})
    )
    state = {"config": config, "learner": {"optimizer_steps": 1}, "iteration": 1, "overlapped": False}
    _, head, body = model_card(state, []).split("---\n", 2)
    assert yaml.safe_load(head).get("datasets") == datasets
    assert f"reinforcement learning on {named}, " in body


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "config").glob("grpo_*.yaml")))
def test_the_differences_of_a_config_give_it_again(name: str) -> None:
    import shlex
    from dataclasses import asdict

    from hydra import compose, initialize_config_dir

    from config.cli.composition import to_config

    register_schema()
    more = (SETS, "env.system_prompt='Be \"brief\", please: one = {word}'", "logging.experiment_name='true'")
    config = asdict(configured(*more, name=name))
    given = [word for text in overrides(config) for word in shlex.split(text)]
    with initialize_config_dir(str(ROOT / "config"), version_base=None):
        again = asdict(to_config(compose("base", overrides=given)))
    assert again == config


@pytest.mark.parametrize("which", ["the run", "a checkpoint", "made anew"])
def test_an_exported_folder_is_a_model(lockstep_run: Path, which: str, tmp_path: Path) -> None:
    checkpoint = lockstep_run / "checkpoints" / "checkpoint_000002"
    source = lockstep_run if which == "the run" else checkpoint
    if which == "made anew":
        source = shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "kept")
    export(tmp_path, f"checkpoint={source}", f"to={tmp_path / 'new' / 'model'}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "model").state_dict()
    number = 4 if which == "the run" else 2
    of_run = AutoModelForCausalLM.from_pretrained(lockstep_run / "models" / f"checkpoint_{number:06d}")
    assert all((tensor == model[name]).all() for name, tensor in of_run.state_dict().items())
    assert names(tmp_path / "new") == ["model"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("to=new",), "run=export without checkpoint"),
        (("checkpoint={run}",), "run=export without to"),
        (("checkpoint=nowhere", "to=new"), "checkpoint=nowhere: no such folder"),
        (("checkpoint={run}/models", "to=new"), "no checkpoints/checkpoint_* in this folder"),
        (("checkpoint={run}", "to={run}"), "there is something already"),
        (("checkpoint={run}", "to=new", "hub=me"), "hub=me: no name of a model on the hub"),
        (("checkpoint={run}", "to=new", "hub=me/model"), "hub=me/model: no token for the hub"),
    ],
)
def test_what_cannot_be_exported(
    lockstep_run: Path, given: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError) as raised:
        export(tmp_path, *(text.format(run=lockstep_run) for text in given))
    assert expected in str(raised.value)
    assert not Path("new").exists()


def test_a_place_that_takes_no_model_is_one_message(lockstep_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    to = tmp_path / "file" / "new"
    with pytest.raises(
        ConfigError, match=rf"to={to}: the model could not be written there \(.*File exists\)"
    ):
        export(tmp_path, f"checkpoint={lockstep_run}", f"to={to}")


def test_of_a_run_that_only_may_be_read(lockstep_run: Path, tmp_path: Path) -> None:
    """The copy gets modes of its own, else nobody but root could put a card into it, or remove it."""
    archive = shutil.copytree(lockstep_run, tmp_path / "archive")
    for path in (*archive.rglob("*"), archive):
        path.chmod(0o555 if path.is_dir() else 0o444)
    export(tmp_path, f"checkpoint={archive}", f"to={tmp_path / 'new'}")
    made = [tmp_path / "new", *(tmp_path / "new").iterdir()]
    assert len(made) > 3 and all(path.stat().st_mode & stat.S_IWUSR for path in made)


def test_where_the_model_has_moved_it_is_named_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has not made the model itself; an adapter needs what it was trained on."""
    base = shutil.copytree(ROOT / "torchgrpo" / "models" / "quickstart", tmp_path / "base")
    lora = ("train_model.lora.enabled=true", "train.export=false", "train.total_dialog_turns=16")
    run_job(configured(*SMALL, *lora, f"model.name={base}"), tmp_path / "run", grpo.train, Lockstep)
    assert not (tmp_path / "run" / "models").exists() and not (tmp_path / "run" / "model").is_symlink()
    base.rename(tmp_path / "moved")
    asked = (f"checkpoint={tmp_path / 'run'}", f"to={tmp_path / 'new'}")
    with pytest.raises(ConfigError, match=rf"began from the model {base}, which is not there.*model\.name="):
        export(tmp_path, *asked)
    named = f"model.name={tmp_path / 'moved'}"
    monkeypatch.setattr("torchgrpo.run.jobs.export.typed", lambda: [*asked, named])
    export(tmp_path, *asked, named)
    assert {"adapter", "model.safetensors"} <= set(names(tmp_path / "new"))


class Hub(BaseHTTPRequestHandler):
    """The hub as far as an upload asks for it; it remembers the files of the commit."""

    files: dict[str, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        host = f"http://{self.headers['Host']}/me/model"
        answer: dict[str, Any] = {"url": host, "commitUrl": f"{host}/commit/1"}
        answer |= {"commitOid": "1", "pullRequestUrl": None}
        if "preupload" in self.path:
            sent = json.loads(body)["files"]
            answer = {
                "files": [
                    {"path": one["path"], "uploadMode": "regular", "oid": None, "shouldIgnore": False}
                    for one in sent
                ]
            }
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            found = [line["value"] for line in lines if line["key"] == "file"]
            type(self).files = {one["path"]: len(one["content"]) for one in found}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/model", "sha": "0", "siblings": [], "type": "user", "name": "me"})

    def _answer(self, answer: dict[str, Any]) -> None:
        said = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize("there", [True, False], ids=["hub", "no hub"])
def test_a_folder_is_uploaded(lockstep_run: Path, there: bool, tmp_path: Path) -> None:
    """To a server on this machine that answers as the hub does; and to one that is not there."""
    Hub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if not there:
        server.shutdown()
        server.server_close()
    environment = {**ENVIRONMENT, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = ("grpo.py", "--config-name", "grpo_quickstart", "run=export", f"checkpoint={lockstep_run}")
    done = ended([*command, f"to={tmp_path / 'to'}", "hub=me/model"], environment=environment)
    assert names(tmp_path / "to") == names(lockstep_run / "model")
    if there:
        assert done.returncode == 0, done.stderr
        assert set(Hub.files) == set(names(tmp_path / "to")) and "uploaded to me/model" in done.stdout
        server.shutdown()
    else:
        assert done.returncode == 2 and "hub=me/model: the upload failed" in done.stderr


def test_the_best_stays_and_a_resumed_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations say 0.5, 0.9 (after 2), 0.3, 0.9, 0.2 ...: the second is the best, whatever follows."""
    said = iter([0.5, 0.1, 0.9, 0.3, 0.9, 0.2, 0.2, 0.4])

    def run(working: Lockstep) -> None:
        evaluation = callback_of(working, Evaluations).evaluation

        def fixed(iteration: int, stopped: Any) -> Any:
            value, key = next(said), "eval/sums/pass@1"
            ends = {f"{key}_low": 0.0, f"{key}_high": 1.0, "eval/sums/problems": 8.0}
            return {key: value, **ends}, [""]

        evaluation.run = fixed  # type: ignore[method-assign]
        grpo.train(working)

    given = (*SMALL, SETS, "train.keep_best=eval/sums/pass@1", "train.keep_checkpoints=1", "eval.frequency=1")
    run_job(configured(*given), tmp_path, run, Lockstep)
    assert names(tmp_path / "checkpoints") == ["best", "checkpoint_000002", "checkpoint_000004"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == "checkpoint_000002"
    assert os.readlink(tmp_path / "models" / "best") == "checkpoint_000002"
    more = ("train.resume=auto", "train.total_dialog_turns=112")
    run_job(configured(*given, *more), tmp_path, run, Lockstep)
    assert names(tmp_path / "models") == ["best", "checkpoint_000002", "checkpoint_000007"]
    export(tmp_path, f"checkpoint={tmp_path}/checkpoints/best", f"to={tmp_path / 'best'}")
    assert "after 2 optimizer steps" in (tmp_path / "best" / "README.md").read_text()


def test_an_evaluation_that_is_the_best_is_followed_by_a_checkpoint(tmp_path: Path) -> None:
    given = ("train.keep_best=eval/sums/score", "train.checkpoint_frequency=0", "eval.frequency=1")
    run_job(configured(*SMALL[:3], SETS, *given), tmp_path, grpo.train, Lockstep)
    best = max(
        (row["eval/sums/score"], -row["iteration"]) for row in rows(tmp_path)[1:] if "iteration" in row
    )
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"checkpoint_{-best[1]:06d}"


def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"keep_best=eval/sums/pass@2: .* there are eval/sums/pass@1, eval/"
    ):
        configured(SETS, "train.keep_best=eval/sums/pass@2")
    with pytest.raises(ConfigError, match=r"there are none without eval\.sets"):
        configured("train.keep_best=eval/sums/pass@1")


def test_a_full_disk_in_the_middle_of_a_model_leaves_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchgrpo.training import model_writer, safetensors_writer

    def full(folder: Path, *arguments: Any, **options: Any) -> None:
        safetensors_writer.write_safetensors(folder, *arguments, **options)
        if "000003" in folder.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_writer, "write_safetensors", full)
    given = (*SMALL[:2], "train.total_dialog_turns=48", "train.checkpoint_frequency=1")
    run_job(configured(*given, "train.keep_checkpoints=1"), tmp_path, grpo.train, Lockstep)
    assert names(tmp_path / "checkpoints") == ["checkpoint_000003"]
    assert names(tmp_path / "models") == ["checkpoint_000002"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    said = capsys.readouterr().err
    assert "checkpoint_000003 is whole, but no model of it was written" in said and "No space left" in said


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
    process = start(str(script), run_dir, *SMALL, "train.keep_checkpoints=1")
    models = run_dir / "models"
    wait_for(lambda: any(models.glob("checkpoint_000003.*.tmp/model.safetensors")), process)
    process.kill()
    process.communicate()
    assert names(run_dir / "checkpoints") == ["checkpoint_000003"]
    assert "checkpoint_000002" in names(models) and "checkpoint_000003" not in names(models)
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    again = ran("grpo.py", run_dir, *SMALL, "train.keep_checkpoints=1", "train.resume=auto")
    said = again.output
    assert names(models) == ["checkpoint_000004"], said
    assert said.splitlines()[-3].startswith(f"model: {run_dir}/model")
    assert f"run=eval model.name={run_dir}/model" in said.splitlines()[-1]
