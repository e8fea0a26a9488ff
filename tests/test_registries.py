"""Extension of each registry by one file, as docs/architecture.md describes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config.schema.config import JOBS
from config.schema.env import ENVIRONMENTS, TOOLS
from config.schema.errors import ConfigError
from config.schema.inference import ENGINES
from config.schema.logging import TRACKERS
from config.schema.optimizer import OPTIMIZERS
from config.schema.policy import OBJECTIVES
from config.schema.registry import Registry
from tests.script_runner import QUICK, ROOT, read_metrics
from torchgrpo.plan.devices import TRANSPORTS

REGISTRIES = [ENGINES, TRACKERS, TRANSPORTS, OPTIMIZERS, OBJECTIVES, TOOLS, ENVIRONMENTS, JOBS]
FILES = {
    "torchgrpo/rollout/engines/backends/added.py": """
from torchgrpo.rollout.engines.backends.transformers import engine_factory as transformers_engine_factory

def engine_factory(config, tokenizer, plan, run_dir=None, adapter=None):
    (run_dir / "engine_of_mine").touch()
    return transformers_engine_factory(config, tokenizer, plan, run_dir, adapter)
""",
    "torchgrpo/monitoring/trackers/added.py": """
import json
from torchgrpo.monitoring.tracker_interface import TrackerFactory

class JsonLinesTracker:
    def __init__(self, logging, run_dir, title, config, on_message):
        self.file = open(run_dir / "tracker_of_mine.jsonl", "w")
    def metrics(self, numbers, step):
        self.file.write(json.dumps({"step": step, **numbers}) + chr(10))
    def completions(self, rows, step):
        pass
    def close(self, outcome):
        self.file.close()

FACTORY = TrackerFactory("json", JsonLinesTracker)
""",
    "torchgrpo/training/optimizers/added.py": """
from torch.optim import SGD
from torchgrpo.training.parameter_groups import parameter_groups

def make_optimizers(model, config):
    return [SGD(parameter_groups(model, config, config.lr, lambda parameter: True), lr=config.lr)]
""",
    "torchgrpo/training/objectives/added.py": """
from torchgrpo.training.policy_terms import PolicyTerm, clip_binds_nowhere

TERM = PolicyTerm(lambda policy, inputs: -inputs.advantage * inputs.log_prob, clip_binds_nowhere)
""",
    "torchgrpo/rollout/weights/transports/added.py": """
from torchgrpo.rollout.weights.transports.shared_memory import make_transport
""",
    "envs/tasks/added.py": """
from envs.task import Example, Reward, Task, register

@register("added")
class DoublingTask(Task):
    in_process = True
    def examples(self, split):
        return [Example(self.messages(f"{n}+{n}="), str(2 * n), n) for n in range(2, 40)]
    def reward(self, completion, example):
        return Reward(float(completion.text.strip() == example.answer))
""",
    "envs/verifiers/added.py": """
from envs.example import Reward
from envs.rewards import reward

@reward("added", in_process=True)
def brevity(completion, example, env):
    return Reward(1.0 / (1 + len(completion.text)))
""",
    "envs/tools/builtin/added.py": '''
def tool(request):
    """You have an echo."""
    return request
''',
    "envs/environments/builtin/added.py": """
def environment(turns, example):
    return f"turn {len(turns)}"
""",
    "torchgrpo/run/jobs/added.py": """
def run(job):
    print("a job of mine:", job.config.run)
    return "finished"
""",
}
USE_ADDED_FILES = (
    *("env.dataset=added", "env.reward=added", "env.tools=[added]", "env.tool_format=tags", "env.max_steps=2"),
    "env.max_prompt_tokens=200",
    *("policy.objective=added", "policy.kl_coef=0", "optimizer.name=added", "optimizer.lr=1e-2"),
    *("logging.backend=added", "inference_model.backend=added"),
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the code with one added file for each registry."""
    folder = tmp_path_factory.mktemp("added") / "checkout"
    folder.mkdir()
    for name in ("config", "envs", "torchgrpo"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("grpo*.py"):
        shutil.copy(script, folder)
    for name, text in FILES.items():
        assert not (folder / name).exists()
        (folder / name).write_text(f'"""Added."""\n{text}')
    return folder


def run_in_checkout(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "grpo.py", "--config-name", "grpo_quickstart", *QUICK, *words],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_run_with_added_files_trains(checkout: Path) -> None:
    short = ("env.num_envs=2", "env.repeats=4", "train.total_dialog_turns=16", "hydra.run.dir=run")
    process = run_in_checkout(checkout, *short, *USE_ADDED_FILES)
    assert process.returncode == 0, process.stderr
    run_dir = checkout / "run"
    assert (run_dir / "engine_of_mine").exists()
    lines = [json.loads(line) for line in (run_dir / "tracker_of_mine.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1.0, 2.0] or [line["step"] for line in lines] == [1, 2]
    metrics = read_metrics(run_dir)
    assert metrics[0]["grad_norm"] > 0 and 0 < metrics[0]["reward/mean"] <= 1


def test_an_added_job_transport_and_environment_are_known(checkout: Path) -> None:
    process = run_in_checkout(checkout, "run=added")
    assert process.returncode == 0 and "a job of mine: added" in process.stdout, process.stderr
    code = (
        "from torchgrpo.plan.devices import TRANSPORTS; print(type(TRANSPORTS.load('added')(None).host_copy).__name__)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "SharedMemory"
    code = (
        "from config.schema.env import EnvConfig; from envs.environments.definition import find_environment; "
        "print(find_environment(EnvConfig(dataset='arithmetic', environment='added')).target([1], None))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "turn 1"


def test_unknown_names_are_refused_with_the_known_ones(checkout: Path) -> None:
    process = run_in_checkout(checkout, "inference_model.backend=sglang")
    assert process.returncode == 2
    assert "inference_model.backend='sglang': choose one of auto, added, http, transformers, vllm" in process.stderr


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.key)
def test_every_name_of_a_registry_loads(registry: Registry) -> None:
    assert registry.names
    for name in registry.names:
        assert registry.load(name) is not None
    with pytest.raises(ConfigError, match=rf"{re.escape(registry.key)}='nothing': choose one of .*{registry.names[0]}"):
        registry.check("nothing")


def test_the_architecture_page_names_the_folder_of_each_kind() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in FILES:
        folder = name.rpartition("/")[0]
        assert re.search(rf"^\| add [^|]*\| [^|]*{folder}/NAME\.py", page, re.MULTILINE), folder
