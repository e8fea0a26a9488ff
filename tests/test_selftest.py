"""`run=selftest`: the runner on checks that work, fail, hang and die, and the bodies that its GPU checks share with
the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from config.policy import PRESETS
from plan.machine import Machine, installed_vllm, this_machine
from selftest import engines, learner
from selftest.catalogue import CHECKS
from selftest.check import Bench, Check, Row
from selftest.main import selftest
from selftest.process import left_of
from selftest.report import FILE, table, vllm_build
from selftest.runner import Processes, forked, fresh, run_check, run_checks
from tests.gpu import longer
from tests.gpu.longer import EXTRA
from tests.processes import command_lines, wait_until_gone
from tests.scripts import ROOT

BODIES = "tests.made_up_checks"
LAPTOP = Machine(num_gpus=0, gpu_memory_gib=None, host_memory_gib=16.0, disk_gib=50.0, vllm=None)


def made_up(name: str, **options: object) -> Check:
    return Check(name, f"{BODIES}.{name}", options, remedy="try again", seconds=60)


@pytest.fixture
def processes() -> Processes:
    return fresh()


# --- the runner ---------------------------------------------------------------------------------------------


def test_what_works_says_what_it_measured_and_leaves_nothing(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    row = run_check(made_up("works", number=7), processes, 60)
    assert (row.status, row.detail) == ("works", "number 7")
    assert not list(tmp_path.iterdir())


def test_a_failure_is_the_exception_and_the_checks_remedy(processes: Processes) -> None:
    row = run_check(made_up("fails"), processes, 60)
    assert (row.status, row.detail, row.remedy) == (
        "does not",
        "ArithmeticError: the sum is wrong",
        "try again",
    )
    assert "in fails" in row.trace


def test_an_assertion_without_words_is_its_line(processes: Processes) -> None:
    row = run_check(made_up("fails_in_silence"), processes, 60)
    assert row.detail == 'AssertionError: assert bench.device == "no such device"'


def test_bad_input_brings_its_own_remedy(processes: Processes) -> None:
    row = run_check(made_up("refuses"), processes, 60)
    assert (row.detail, row.remedy) == ("ray.address=nowhere: no cluster; leave it unset", "")


def test_what_does_not_load_is_named(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the module of the check that imports it, and not that this module lacks a function."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_another_version.py").write_text("")
    (tmp_path / "imports_it.py").write_text("from of_another_version import gone")
    row = run_check(Check("an import", "imports_it.inside.works", remedy="try again"), processes, 60)
    place = f"(ImportError in {tmp_path / 'imports_it.py'}, line 1)"
    assert (row.status, row.remedy) == ("does not", "")
    assert row.detail.startswith("a package does not load: cannot import name 'gone'")
    assert place in row.detail


@pytest.mark.parametrize(("name", "why"), [("dies", "ended by SIGSEGV"), ("exits", "exit code 3")])
def test_a_process_that_dies_takes_only_its_own_row_down(name: str, why: str, processes: Processes) -> None:
    row = run_check(made_up(name), processes, 60)
    assert row.status == "does not"
    assert why in row.detail


def test_what_worked_and_does_not_end_does_not_work(processes: Processes) -> None:
    row = run_check(made_up("works_and_does_not_end"), processes, 6)
    assert row.status == "does not"
    assert row.detail == "it worked, but its process was not finished after 6 s when it should have ended"


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path, processes: Processes) -> None:
    noted = tmp_path / "pids"
    row = run_check(made_up("hangs_with_a_child", noted=str(noted)), processes, 6)
    assert row.status == "does not"
    assert "not finished after 6 s" in row.detail
    assert "in wait" in row.detail, "where it stood"
    for pid in map(int, noted.read_text().split()):
        wait_until_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_self_test_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    command = [sys.executable, "-m", BODIES, str(noted)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not noted.exists() or not noted.read_text():
        assert time.monotonic() < deadline, "the check did not start within 120 s"
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(120)
    check, child = map(int, noted.read_text().split())
    wait_until_gone(check)
    if (
        number == signal.SIGINT
    ):  # else nobody is left who could end what the check has put into a session of its own
        wait_until_gone(child)
    else:
        os.kill(child, signal.SIGKILL)


def test_the_server_forks_checks_where_it_can(tmp_path: Path) -> None:
    """The processes of that server have everything in memory before they begin."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # a process has but one, and another test may have started it
    row = run_check(Check("parent", f"{BODIES}.parent"), forked(), 120)
    assert row.status == "works", row.trace
    pid, *loaded = row.detail.split()
    assert int(pid) != os.getpid()
    assert {"torch", "run.engines", "selftest.runs"} <= set(loaded)
    assert ("vllm" in loaded) == (installed_vllm() is not None)


def loaded_to_be_forked(folder: Path, modules: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A process that loads these, of which those named thread_... start one, and says which it then has."""
    for name in modules:
        (folder / f"{name}.py").write_text(
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
            if name.startswith("thread")
            else ""
        )
    told = f"print(*sorted({set(modules)} & sys.modules.keys()))"
    code = f"import sys; from selftest.forkable import load; load({modules}); {told}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_module_that_starts_a_thread_is_left_to_the_forks(tmp_path: Path) -> None:
    """A fork of a process with threads may hang, so the process begins again without that module."""
    done = loaded_to_be_forked(tmp_path, ["plain", "thread_one", "after", "thread_two"])
    assert done.stdout.split() == ["after", "plain"], done.stderr
    told = done.stderr.splitlines()
    assert len(told) == 2
    for name, line in zip(("thread_one", "thread_two"), told, strict=True):
        assert re.fullmatch(
            rf"importing {name} starts a thread \(.+\): each check imports it by itself", line
        )


def test_where_every_module_starts_a_thread_none_is_left_out_in_vain(tmp_path: Path) -> None:
    done = loaded_to_be_forked(tmp_path, [f"thread_{number}" for number in range(5)])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"imports have started a thread \(.+\): every check starts from nothing, and slower", last
    )


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_threads_that_the_user_asks_for_do_not_keep_the_server_from_forking(name: str) -> None:
    code = (
        "from selftest.process import quiet_environment; quiet_environment(); import numpy; "
        "from selftest.forkable import hindrance; print(hindrance())"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, name: "4"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done.stderr


def test_the_thread_of_an_allocator_does_not_keep_the_server_from_forking() -> None:
    """pyarrow, which transformers import by way of scikit-learn and pandas where they are installed."""
    code = (
        "import os, psutil, pyarrow\n"
        "from selftest.forkable import hindrance\n"
        "print(psutil.Process().num_threads(), hindrance(), flush=True)\n"
        "child = os.fork()\n"
        "if not child: os._exit(len(pyarrow.array(range(7))))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 None\n7\n", done.stderr


DRIVER = """
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>
static int ready;
static void *work(void *nothing) { for (;;) pause(); }
int cuInit(unsigned flags) { ready = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return ready ? 0 : 3; }
int nvmlInit(void) {
    pthread_t one;
    pthread_create(&one, 0, work, 0);
    return pthread_setname_np(one, "cuda00001800007");
}
"""
"""In the place of NVIDIA's libraries, which need a GPU: one errs until it is initialized, one starts a thread."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_nvml_does_not_keep_the_server_from_forking_and_cuda_does(tmp_path: Path) -> None:
    """vLLM's import asks NVML for GPUs, which starts a thread; the driver says whether CUDA is in use."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    compiled = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "driver.c")]
    subprocess.run([*compiled, "-Wl,-soname,libcuda.so.1"], check=True, timeout=60)
    code = (
        "import ctypes, psutil\n"
        "from selftest.forkable import hindrance\n"
        f"without, driver = hindrance(), ctypes.CDLL({str(library)!r})\n"
        "driver.nvmlInit()\n"
        "print(psutil.Process().num_threads(), without, hindrance())\n"
        "driver.cuInit(0)\n"
        "print(hindrance())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 None None\nthe CUDA driver\n", done.stderr


def test_a_fresh_process_has_less_time_left_than_it_was_given() -> None:
    """It has imported before it began, and its stacks are wanted before it is killed."""
    age = time.time() - psutil.Process().create_time()
    assert left_of(1e6) == pytest.approx(1e6 - age, abs=1)
    assert left_of(age / 2) == 0.1


def test_a_server_that_does_not_start_is_done_without() -> None:
    assert run_check(made_up("works"), Processes(SimpleNamespace(Process=broken)), 60).status == "works"


def broken(*arguments: object, **named: object) -> None:
    raise EOFError("the server is gone")


def test_rows_say_what_is_not_here_and_what_was_not_tried() -> None:
    gpu = replace(made_up("works"), gpus=2)
    vllm = replace(made_up("works"), vllm=True)
    said: list[Row] = []
    rows = run_checks([gpu, vllm], LAPTOP, None, said.append, fresh())
    assert [row.status for row in rows] == ["not here"] * 2
    assert rows[0].detail == "needs 2 GPUs, this machine shows 0"
    assert "make vllm" in rows[1].detail
    assert said == rows
    assert vllm.missing(LAPTOP, "cpu") is None
    assert "needs the CPU build of vLLM, installed is the CUDA build" in str(vllm.missing(LAPTOP, "cuda"))
    (row,) = run_checks([made_up("works")], LAPTOP, None, said.append, fresh(), total_s=0.0)
    assert row.status == "does not"
    assert row.detail == "not tried: the time of the whole self-test was over"
    (row,) = run_checks([made_up("works")], LAPTOP, None, said.append, fresh(), total_s=0.1)
    assert row.detail == "not tried to its end: the time of the whole self-test was over"


def test_the_table_shows_reason_and_remedy() -> None:
    lines = table(
        [Row("a", "works", 1.0, "fine"), Row("longer", "does not", 2.0, "it broke", "mend it")]
    ).splitlines()
    assert lines[0] == "a       works       1.0 s  fine"
    assert lines[1:] == ["longer  does not    2.0 s", "    it broke", "    remedy: mend it"]


@pytest.mark.parametrize(("name", "code"), [("works", 0), ("fails", 1)])
def test_exit_code_and_file(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selftest(tmp_path, [made_up(name), replace(made_up("dies"), gpus=64)], fresh) == code
    told = json.loads((tmp_path / FILE).read_text())
    assert [row["status"] for row in told["checks"]] == ["works" if code == 0 else "does not", "not here"]
    assert told["packages"]["torch"]
    assert told["machine"]["host_memory_gib"] > 0
    printed = capsys.readouterr().out
    assert ("ArithmeticError: the sum is wrong" in printed) == bool(code)
    assert "not here: 1" in printed


# --- the real checks ----------------------------------------------------------------------------------------


def test_every_check_is_one_function_with_a_name_and_a_remedy_of_its_own() -> None:
    every = (*CHECKS, *EXTRA)
    assert len({check.name for check in every}) == len(every)
    assert all(callable(check.function) and check.remedy for check in every)
    assert all((check.device == "cuda") == (check.gpus > 0) for check in every)


CPU_CHECKS = ["sandbox", "output head, CPU", "fp16, CPU", "resume, CPU", "push in mid-flight, CPU"]


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """Some of the real checks, and all that this machine lacks something for."""
    machine = this_machine(tmp_path)
    chosen = [check for check in CHECKS if check.name in CPU_CHECKS or check.missing(machine, vllm_build())]
    assert selftest(tmp_path, chosen) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / FILE).read_text())["checks"]}
    for check in chosen:
        lacking = check.missing(machine, vllm_build())
        assert rows[check.name]["status"] == ("not here" if lacking else "works")
    assert rows["resume, CPU"]["detail"] == "equal bits"


def test_the_default_config_needs_neither_its_model_nor_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """grpo_gsm8k names a model on the hub and device=cuda."""
    import grpo_utils
    from config.schema import Config
    from run.lockstep import Lockstep
    from tests.scripts import configured

    monkeypatch.setattr("selftest.main.CHECKS", ())
    seen: list[Path] = []
    monkeypatch.setattr("selftest.main.selftest", lambda run_dir: seen.append(run_dir) or 1)
    config: Config = configured("run=selftest", name="grpo_gsm8k")
    monkeypatch.setattr(grpo_utils, "command_line", lambda job: job(config, tmp_path, lambda: None))
    with pytest.raises(SystemExit) as ended:
        grpo_utils.launch(lambda working: None, Lockstep)
    assert ended.value.code == 1
    assert seen == [tmp_path]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_objectives_in_another_layout(bench: Bench) -> None:
    assert f"{len(list(PRESETS.glob('*.yaml')))} presets" in learner.presets(bench)


def test_two_ranks(bench: Bench) -> None:
    assert "2 steps" in learner.ranks(bench, ["policy.kl_coef=0.1"])


def test_a_fault_in_an_objective_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that leaves a factor out where rows are packed."""
    plain = learner.stepped

    def off(config, bench, batch):  # type: ignore[no-untyped-def]
        metrics, gradient = plain(config, bench, batch)
        return metrics, gradient * (1.01 if config.train.packing else 1)

    monkeypatch.setattr(learner, "stepped", off)
    with pytest.raises(AssertionError, match="gradient or loss differs"):
        learner.presets(bench)


def test_reference_and_resume(bench: Bench) -> None:
    learner.references(bench, ["host memory", "base of the LoRA policy"])
    learner.resumes(bench)
    longer.memory(bench)


def test_the_heads_rate_is_measured(bench: Bench) -> None:
    """The sizes are small and the share is none: it is about running."""
    assert "TFLOPS" in longer.head_speed(bench, width=128, vocabulary=512, rows=4, length=8, share=0.0)


def test_iterations_in_turns(bench: Bench) -> None:
    overrides = ["inference_model.backend=transformers"]
    assert engines.turns(bench, overrides) == "no GPU memory to give back"


def test_no_process_of_a_check_is_left() -> None:
    """Of those above; the fork server ends with this process."""
    assert not [line for line in command_lines() if "sleep(600)" in line]
