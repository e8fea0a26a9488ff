"""Runs on a Ray cluster (`ray.address`) that loses a node with engines, ranks or scorers."""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from config.run_folder.checkpoints import newest_checkpoint
from tests.processes import process_tree
from tests.ray_cluster import ADDRESS, RayCluster, has_namespaces
from tests.script_runner import read_metrics, start_script, wait_for_output, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (shutil.which("unshare") and shutil.which("nsenter") and has_namespaces()),
        reason="a network namespace for the cluster cannot be made here",
    ),
]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    ray_cluster = RayCluster()
    try:
        ray_cluster.start_node(1)
        ray_cluster.start_node(2)
        yield ray_cluster
    finally:
        ray_cluster.close()


def test_a_run_survives_the_loss_of_an_engine_node(cluster: RayCluster, tmp_path: Path) -> None:
    """A lost engine comes back on a new node.

    Each node has one CPU and therefore one engine. Weights travel through the object stores of the nodes.
    """
    process = start_script(
        "grpo_async.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        "inference_model.num_devices=2",
        "train.total_dialog_turns=1600000",
        enter=cluster.enter,
        environment=cluster.environment,
    )
    log = tmp_path / "grpo.log"
    wait_until(lambda: num_logged_steps(tmp_path) >= 5, process)
    engines = cluster.engines()
    assert len(engines) == 2
    niceness = {psutil.Process(pid).nice() for pid in engines}
    assert niceness == {psutil.Process().nice()}, "RAY_worker_niceness=0 applies on every node"
    cluster.kill_node(2)
    wait_until(lambda: "engine 1 (CPU) is lost" in log.read_text(), process)
    lost_at = num_logged_steps(tmp_path)
    wait_until(lambda: num_logged_steps(tmp_path) >= lost_at + 5, process)  # on the remaining engine
    cluster.start_node(3)
    wait_until(lambda: "engine 1 (CPU) is back, with policy version" in log.read_text(), process)
    back_at = num_logged_steps(tmp_path)
    wait_until(lambda: num_logged_steps(tmp_path) >= back_at + 5, process)
    script = next(child for child in process_tree(process.pid) if child.name() != "nsenter")
    script.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert [row["policy_version"] for row in read_metrics(tmp_path)] == list(range(num_logged_steps(tmp_path)))
    deadline = time.monotonic() + 300
    while cluster.engines() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.engines() == []


def num_logged_steps(run_dir: Path) -> int:
    """Returns the number of complete lines in metrics.jsonl; the run may be writing another."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_a_run_restarts_after_the_loss_of_a_rank_node(cluster: RayCluster, tmp_path: Path) -> None:
    """The run restarts from its newest checkpoint after a new node has joined.

    Three nodes have one CPU each: two for the ranks, one for the engine. The ranks connect by the addresses of the
    nodes, write a checkpoint together, and push through the object store. The remaining rank cannot continue alone.
    """
    cluster.start_node(3)
    process = start_script(
        "grpo.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        *("train_model.num_devices=2", "train_model.num_nodes=2", "env.num_envs=4", "env.repeats=4"),
        *("train.restarts=1", "train.total_dialog_turns=1600000"),
        *("train.checkpoint_frequency=1", "train.keep_checkpoints=100"),  # the newest stays while it is read
        enter=cluster.enter,
        environment=cluster.environment,
    )
    log = tmp_path / "grpo.log"
    wait_until(lambda: num_logged_steps(tmp_path) >= 3, process)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    writers = {path.name for path in (newest / "learner").glob("*.distcp")}
    assert len(writers) == 2, writers
    cluster.kill_node(cluster.node_with_actor("RankActor"))
    cluster.start_node(4)
    wait_until(lambda: "restarts are left" in log.read_text(), process)
    restarted_at = num_logged_steps(tmp_path)
    wait_until(lambda: num_logged_steps(tmp_path) >= restarted_at + 5, process)
    script = next(child for child in process_tree(process.pid) if child.name() != "nsenter")
    script.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    log_text = log.read_text()
    assert re.search(r"learner rank \d \(CPU\) died in", log_text), log_text
    assert "0 of 1 restarts are left (train.restarts)" in log_text
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == list(range(1, num_logged_steps(tmp_path) + 1))


def test_a_run_survives_the_loss_of_a_scorer_node(cluster: RayCluster, tmp_path: Path) -> None:
    """The remaining scorer continues, and the lost one comes back on a new node.

    Three nodes have one CPU each: two for copies of the reference, one for the engine. The run does not restart.
    """
    cluster.start_node(3)
    process = start_script(
        "grpo.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        *("ref_model.num_devices=2", "policy.kl_coef=0.1", "env.num_envs=4", "env.repeats=4"),
        *("train.gradient_accumulation_steps=2", "train.restarts=0", "train.total_dialog_turns=1600000"),
        enter=cluster.enter,
        environment=cluster.environment,
    )
    log = tmp_path / "grpo.log"
    wait_until(lambda: num_logged_steps(tmp_path) >= 3, process)
    cluster.kill_node(cluster.node_with_actor("ScorerActor"))
    wait_until(lambda: "is lost and replaced" in log.read_text(), process)
    lost_at = num_logged_steps(tmp_path)
    wait_until(lambda: num_logged_steps(tmp_path) >= lost_at + 3, process)  # with the remaining copy
    cluster.start_node(4)
    wait_until(lambda: re.search(r"the copy of the frozen model .* is back", log.read_text()), process)
    script = next(child for child in process_tree(process.pid) if child.name() != "nsenter")
    script.send_signal(signal.SIGINT)
    output = wait_for_output(process)
    assert process.returncode == 0, output
    assert [row["optimizer_step"] for row in read_metrics(tmp_path)] == list(range(1, num_logged_steps(tmp_path) + 1))
    assert read_metrics(tmp_path)[-1]["kl/ref"] > 0
