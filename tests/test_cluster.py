"""`ray.address`: the scripts on a cluster of two nodes, one of which fails in mid-run and comes back as another.

Then learner ranks on two nodes of three, and scorers on two of three, one of which fails.
"""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from config.run_folder.checkpoints import newest_checkpoint
from tests.processes import family
from tests.ray_cluster import ADDRESS, RayCluster, namespaces_allowed
from tests.scripts import finish, rows, start, wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (shutil.which("unshare") and shutil.which("nsenter") and namespaces_allowed()),
        reason="a network namespace for the cluster cannot be made here",
    ),
]


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    one = RayCluster()
    try:
        one.start_node(1)
        one.start_node(2)
        yield one
    finally:
        one.close()


def test_a_run_survives_the_loss_of_a_node(cluster: RayCluster, tmp_path: Path) -> None:
    """One CPU a node, so that each carries an engine; weights travel through the nodes' object stores."""
    process = start(
        "grpo_async.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        "inference_model.num_devices=2",
        "train.total_dialog_turns=1600000",
        enter=cluster.enter,
        environment=cluster.environment,
    )
    said = tmp_path / "grpo.log"
    wait_for(lambda: steps(tmp_path) >= 5, process)
    engines = cluster.engines()
    assert len(engines) == 2
    niceness = {psutil.Process(pid).nice() for pid in engines}
    assert niceness == {psutil.Process().nice()}, "RAY_worker_niceness=0 reaches every node"
    cluster.kill_node(2)
    wait_for(lambda: "engine 1 (CPU) is lost" in said.read_text(), process)
    lost_at = steps(tmp_path)
    wait_for(lambda: steps(tmp_path) >= lost_at + 5, process)  # on the engine that is left
    cluster.start_node(3)
    wait_for(lambda: "engine 1 (CPU) is back, with policy version" in said.read_text(), process)
    back_at = steps(tmp_path)
    wait_for(lambda: steps(tmp_path) >= back_at + 5, process)
    script = next(one for one in family(process.pid) if one.name() != "nsenter")
    script.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    assert "interrupted" in output
    assert [row["policy_version"] for row in rows(tmp_path)] == list(range(steps(tmp_path)))
    deadline = time.monotonic() + 300
    while cluster.engines() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert cluster.engines() == []


def steps(run_dir: Path) -> int:
    """Whole lines: the run may be writing another one."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_learner_ranks_on_two_nodes_one_of_which_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """Three nodes with one CPU each: two for the ranks, one for the engine. They meet over the nodes' addresses, write
    a checkpoint together, and push through the object store. The rank that is left cannot go on without the other: the
    run begins anew at its newest checkpoint, once another node has joined."""
    cluster.start_node(3)
    process = start(
        "grpo.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        *("train_model.num_devices=2", "train_model.num_nodes=2", "env.num_envs=4", "env.repeats=4"),
        *("train.restarts=1", "train.total_dialog_turns=160", "train.checkpoint_frequency=1"),
        enter=cluster.enter,
        environment=cluster.environment,
    )
    wait_for(lambda: steps(tmp_path) >= 3, process)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    writers = {path.name for path in (newest / "learner").glob("*.distcp")}
    assert len(writers) == 2, writers
    cluster.kill_node(cluster.node_of("RankActor"))
    cluster.start_node(4)
    output = finish(process)
    assert process.returncode == 0, output
    said = (tmp_path / "grpo.log").read_text()
    assert re.search(r"learner rank \d \(CPU\) died in", said), said
    assert "0 of 1 restarts are left (train.restarts)" in said
    assert [row["optimizer_step"] for row in rows(tmp_path)] == list(range(1, 11))


def test_scorers_on_two_nodes_one_of_which_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """The copy that is left goes on, and the other comes back on a new node.

    Three nodes have one CPU each: two for the copies of the reference, one for the engine. The run does not begin anew.
    """
    cluster.start_node(3)
    process = start(
        "grpo.py",
        tmp_path,
        f"ray.address={ADDRESS}",
        *("ref_model.num_devices=2", "policy.kl_coef=0.1", "env.num_envs=4", "env.repeats=4"),
        *("train.gradient_accumulation_steps=2", "train.restarts=0", "train.total_dialog_turns=1600000"),
        enter=cluster.enter,
        environment=cluster.environment,
    )
    said = tmp_path / "grpo.log"
    wait_for(lambda: steps(tmp_path) >= 3, process)
    cluster.kill_node(cluster.node_of("ScorerActor"))
    wait_for(lambda: "is lost and replaced" in said.read_text(), process)
    lost_at = steps(tmp_path)
    wait_for(lambda: steps(tmp_path) >= lost_at + 3, process)  # with the copy that is left
    cluster.start_node(4)
    wait_for(lambda: re.search(r"the copy of the frozen model .* is back", said.read_text()), process)
    script = next(one for one in family(process.pid) if one.name() != "nsenter")
    script.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 0, output
    assert [row["optimizer_step"] for row in rows(tmp_path)] == list(range(1, steps(tmp_path) + 1))
    assert rows(tmp_path)[-1]["kl/ref"] > 0
