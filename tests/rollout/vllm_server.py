"""Real vLLM servers of tests: their command, start, SIGKILL and restart on one port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from tests.processes import process_tree, wait_for_exit
from tests.rollout.recording import QUICKSTART

MISSING = [
    name
    for name in ("vllm", "uvicorn", "prometheus_fastapi_instrumentator", "model_hosting_container_standards")
    if find_spec(name) is None
]
"""Packages that a server needs and that are not installed."""
MAX_MODEL_LEN = 512
_START_S = 600.0
_RUNNING = "vllm:num_requests_running{"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class VLLMServerProcess:
    """Server process of the quickstart model. options: further options of its command line."""

    def __init__(self, log: Path, *options: str, dev_mode: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._options = options
        self._dev_mode = dev_mode
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Starts the process; `wait_until_ready` waits for it."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(QUICKSTART)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"]
        command += ["--kv-cache-memory-bytes", "200000000", "--generation-config", "vllm", "--enable-scale-out"]
        command += ["--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill"]
        command += ["--max-num-batched-tokens", "4096", "--scheduling-policy", "priority", *self._options]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": str(int(self._dev_mode)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an engine in the tests' process sets it
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except OSError:
            return False

    def pauses_while_running(self, count: int) -> bool:
        """Pauses the engine and returns whether `count` sequences are running; otherwise the engine continues.

        The HTTP server is another process and answers meanwhile. A paused engine can only be killed.
        """
        engine_processes = process_tree(self._process.pid)[1:]
        for process in engine_processes:
            process.suspend()
        if self.num_running_requests() >= count:
            return True
        for process in engine_processes:
            process.resume()
        return False

    def num_running_requests(self) -> int:
        """Returns the number of sequences in the engine, as of its last step."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        return round(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(_RUNNING)))

    def kill(self) -> None:
        """Kills the server and its engine by SIGKILL, as a group."""
        processes = process_tree(self._process.pid)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in processes:
            wait_for_exit(process.pid)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
