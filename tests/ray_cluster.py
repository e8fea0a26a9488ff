"""Ray cluster of several nodes on one machine, in namespaces whose only network is loopback.

    unshare (net, pid, mount) ── init: enables loopback, waits, reaps orphans
        ├── node 127.0.0.1: ray start --head      nodes talk through their own object stores, as hosts do
        ├── node 127.0.0.2: ray start --address   SIGKILL of all its processes simulates a failing machine
        └── the script under test                 with ray.address=127.0.0.1:PORT

Init ends when the test closes its standard input, or dies; the kernel then ends everything in the namespace.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.namespaces import USER_OPTIONS, nsenter
from tests.processes import actor_pids, engine_pids, process_tree

PORT = 6399
ADDRESS = f"127.0.0.1:{PORT}"
LIMIT_S = 300.0
NAMESPACE = ["unshare", *USER_OPTIONS, "--net", "--pid", "--mount-proc", "--fork"]
INIT_SCRIPT = """
import fcntl, signal, socket, struct, sys
with socket.socket() as any_socket:
    up = struct.pack("16sh", b"lo", 0x1)  # SIOCSIFFLAGS, IFF_UP
    fcntl.ioctl(any_socket, 0x8914, up)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
"""


def has_namespaces() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True, timeout=LIMIT_S).returncode == 0
    except OSError:
        return False


class RayCluster:
    """Cluster of nodes with one CPU each, at 127.0.0.1 (the head), 127.0.0.2, ...

    `close` ends the nodes and all processes that they started.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        pipe = subprocess.PIPE
        self._init = subprocess.Popen([*NAMESPACE, sys.executable, "-c", INIT_SCRIPT], stdin=pipe, stdout=pipe)
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"up\n"
        (inside,) = psutil.Process(self._init.pid).children()
        self.enter = nsenter(inside.pid, ["net", "pid", "mount"])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": self._folder.name,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        self._nodes: dict[int, psutil.Popen] = {}

    def start_node(self, number: int) -> None:
        """Starts a node at 127.0.0.`number` (1 is the head) and waits until Ray runs there."""
        role_arguments = (
            ["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 1 else [f"--address={ADDRESS}"]
        )
        size = ["--num-cpus=1", f"--object-store-memory={2**27}"]
        address_arguments = [
            f"--node-ip-address=127.0.0.{number}",
            "--dashboard-agent-listen-port=0",
        ]  # another port than the head's
        ray = ["-c", "from ray.scripts.scripts import main; main()"]
        start = [*ray, "start", "--block", *role_arguments, *size, *address_arguments]
        log_file = Path(self._folder.name, f"node-{number}.txt")
        with log_file.open("w") as output:
            self._nodes[number] = psutil.Popen(
                [*self.enter, sys.executable, *start], env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + LIMIT_S
        while "Ray runtime started" not in log_file.read_text():
            late = time.monotonic() > deadline
            assert self._nodes[number].poll() is None and not late, (
                f"node {number} did not start: {log_file.read_text()}"
            )
            time.sleep(0.1)

    def kill_node(self, number: int) -> None:
        """Kills all processes of a node at once, as a power cut does."""
        node = self._nodes.pop(number)
        for process in reversed(process_tree(node.pid)):
            with suppress(psutil.NoSuchProcess):  # ended together with another process of the node
                process.kill()
        node.wait(LIMIT_S)

    def engines(self) -> list[int]:
        """Returns the process ids of the pool's engine actors on all nodes."""
        return [pid for node in self._nodes.values() for pid in engine_pids(node.pid)]

    def node_with_actor(self, actor: str) -> int:
        """Returns the number of a node other than the head that runs such an actor."""
        others = [number for number in self._nodes if number != 1]
        return next(number for number in others if actor_pids(self._nodes[number].pid, actor))

    def close(self) -> None:
        self._init.communicate(timeout=LIMIT_S)
        self._folder.cleanup()
