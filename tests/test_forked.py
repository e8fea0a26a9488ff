"""A forked script against the same script in a new interpreter, and what Ray starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from ray.dashboard.consts import _PARENT_DEATH_THREASHOLD as PARENT_DEATHS
from ray.dashboard.consts import DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S as LOOKS_EVERY_S

from cluster.runtime import Place, start_actor
from plan.machine import installed_vllm
from tests import own_words
from tests.forked import WANTS_VLLM, Forked, can_fork
from tests.processes import family, wait_until_gone
from tests.scripts import ENVIRONMENT, ROOT, ended, finish, rows, start, start_fresh, without_clocks

pytestmark = pytest.mark.skipif(not can_fork(ENVIRONMENT), reason="scripts are not forked here")
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SMALL = ("env.num_envs=4", "env.repeats=4", "train.total_dialog_turns=64")
LORA = "train_model.lora.enabled=true"
ADAPTER = (LORA, "inference_model.lora=adapter")
LOOK = """
import json, os, random, signal, sys, threading
import multiprocessing as mp
print(json.dumps({
    "name": __name__, "file": __file__, "main": sys.modules["__main__"].__file__, "arguments": sys.argv,
    "path": sys.path, "folder": os.getcwd(), "threads": threading.active_count(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "process": mp.current_process().name,
    "parent": mp.parent_process() is None, "group": os.getpgid(0), "files": sorted(os.listdir("/proc/self/fd"))[:3],
}))
"""


def ran(source: str, folder: Path, forked: bool, variables: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a script in `folder`."""
    script = folder / "script.py"
    script.write_text(source)
    command, environment = [str(script), "--option", "a b"], {**ENVIRONMENT, **variables}
    if forked:
        process = Forked(command, folder, environment)
        out, err = process.communicate(timeout=100)
        return process.wait(), out, err
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout, done.stderr


def test_a_script_finds_what_a_new_interpreter_finds(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(tmp_path / "modules")}
    seen = [json.loads(ran(LOOK, tmp_path, forked, variables)[1]) for forked in (True, False)]
    by_ray = seen[0]["path"].pop(0)
    assert seen[0] == seen[1]
    assert by_ray.endswith("ray/thirdparty_files"), "as every import of Ray does"
    assert seen[0]["path"][:2] == [str(tmp_path), str(tmp_path / "modules")]


@needs_vllm
def test_vllm_is_there_for_whoever_wants_it_and_its_variables_are_not(tmp_path: Path) -> None:
    source = "import os, sys; print('vllm.v1.engine.llm_engine' in sys.modules, *sorted(os.environ))"
    (tmp_path / "script.py").write_text(source)
    processes = [Forked(["script.py", *words], tmp_path, ENVIRONMENT) for words in ([WANTS_VLLM], [])]
    (there, *variables), (not_there, *others) = [
        each.communicate(timeout=100)[0].split() for each in processes
    ]
    assert (there, not_there) == ("True", "False")
    assert variables == others


def test_modules_see_the_variables_of_the_script(tmp_path: Path) -> None:
    """Those of a fork have been loaded with others: it is a new interpreter."""
    source = "import os; from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    variables = {"HF_HUB_CACHE": "/elsewhere"}
    with pytest.raises(ValueError, match="/elsewhere"):
        ran(source, tmp_path, True, variables)
    assert ended(["script.py"], tmp_path, {**ENVIRONMENT, **variables}).stdout == "/elsewhere\n"


def test_a_script_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    process = Forked(["script.py"], tmp_path, ENVIRONMENT)
    process._keeper.close()
    wait_until_gone(process.pid)


def test_a_worker_ends_with_its_raylet() -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    body = f"from tests.forked_ray import end_with; end_with({raylet.pid})"
    worker = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(timeout=2.0)
    raylet.kill()
    raylet.wait()
    assert worker.wait(timeout=60.0) == 1


class Actor:
    """What an actor of Ray finds."""

    def __init__(self, visible: dict[str, str]) -> None: ...

    def look(self) -> tuple[str, str]:
        """OMP_NUM_THREADS, and its parent's command."""
        return os.environ["OMP_NUM_THREADS"], " ".join(psutil.Process(os.getppid()).cmdline())


@pytest.fixture(scope="module")
def agents(local_ray: None) -> tuple[list[psutil.Process], float]:
    """The forked agents of the raylet that the tests here share, and when they were seen."""
    below = psutil.Process().children(recursive=True)
    (raylet,) = [process for process in below if process.name() == "raylet"]
    scripts = ("dashboard/agent.py", "runtime_env/agent/main.py")
    clients = [
        child for child in raylet.children() if any(word.endswith(scripts) for word in child.cmdline())
    ]
    return [fork for agent in clients for fork in family(agent.pid) if fork not in clients], time.monotonic()


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_actor_is_forked_unless_its_variables_are_others(threads: int) -> None:
    """Two threads of OpenMP are read as torch is loaded."""
    actor = start_actor(Actor, Place("one that looks"), threads, {})
    variable, parent = ray.get(actor.look.remote(), timeout=60.0)
    assert variable == str(threads)
    assert ("from tests.fork_server import main" in parent) == (threads == 1)
    assert ("/raylet " in parent) == (threads == 2)


def test_threads_are_not_forked() -> None:
    assert not can_fork({**ENVIRONMENT, "OMP_NUM_THREADS": "2"})


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import os; print('said', flush=True); os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os\ntry: os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt: print('stopped')", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import sys; sys.exit('why')", 1),
        ("import sys; print('said'); sys.exit(7)", 7),
        ("raise KeyError('no')", 1),
        ("import atexit; atexit.register(print, 'last')", 0),
        ("import threading; threading.Timer(0.2, print, ['later']).start()", 0),
    ],
)
def test_it_ends_as_in_a_new_interpreter(source: str, code: int, tmp_path: Path) -> None:
    ours, theirs = (ran(source, tmp_path, forked, {}) for forked in (True, False))
    assert ours[0] == theirs[0] == code
    assert ours[1] == theirs[1]
    assert ours[2].splitlines()[-1:] == theirs[2].splitlines()[-1:]


def test_one_that_does_not_end_is_waited_for_in_vain_and_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    process = Forked(["script.py"], tmp_path, ENVIRONMENT)
    assert process.poll() is None
    for wait in (process.communicate, process.wait):
        with pytest.raises(subprocess.TimeoutExpired):
            wait(timeout=0.2)
    process.kill()
    assert process.communicate(timeout=60) == ("begun\n", "")
    assert process.poll() == process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("script", "overrides", "code"),
    [
        ("grpo.py", (*own_words.SMALL, own_words.EVALUATION, LORA, "logging.backend=tensorboard"), 0),
        ("grpo_async.py", (*SMALL, "train.max_policy_age=0"), 0),
        ("grpo.py", (*SMALL, "optimizer.lr=1e30", "optimizer.warmup_steps=0"), 1),
        ("grpo.py", ("env.repeats=1",), 2),
        pytest.param("grpo.py", (*own_words.SMALL, WANTS_VLLM, *ADAPTER), 0, marks=needs_vllm),
    ],
)
def test_a_run_says_and_leaves_the_same(
    script: str, overrides: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """As for numbers, of two interpreters that hash texts in different ways. What a new one says is all ours: torch and
    vLLM, too, are silent as they are imported."""
    folder = tmp_path / "run"
    seen = []
    for begin in (start, start_fresh):
        process = begin(script, folder, *overrides)
        said = finish(process)
        assert process.returncode == code, said
        if code == 0:
            own_words.check_every_line_is_ours(said)
        left = sorted(path.relative_to(folder) for path in folder.rglob("*") if "tfevents" not in path.name)
        numbers = without_clocks(rows(folder)) if code == 0 else []
        seen.append((own_words.without_progress(said), left, numbers))
        shutil.rmtree(folder, ignore_errors=True)
    assert seen[0] == seen[1]


def test_the_agents_of_a_raylet_are_forked_and_live(agents: tuple[list[psutil.Process], float]) -> None:
    """Longer than one of Ray's own would that does not find the raylet as its parent: the last test, for most of that
    time has passed by now."""
    forks, seen_at = agents
    assert len(forks) == 2
    until = seen_at + PARENT_DEATHS * LOOKS_EVERY_S + 2
    _, alive = psutil.wait_procs(forks, timeout=max(until - time.monotonic(), 0))
    assert set(alive) == set(forks)
