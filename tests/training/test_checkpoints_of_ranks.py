"""Checkpoints of two gloo ranks and of one process, each resumed by the other."""

from pathlib import Path

import pytest
import torch

from tests.script_runner import ENVIRONMENT, ROOT, start_python
from tests.training.checkpoint_rank_script import COUNTS, STEPS, TinyTraining
from torchgrpo.training.checkpoint_tensors import check_tensor_files, saved_shapes

pytestmark = pytest.mark.long

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    """Runs two ranks; returns their folder and the final weights by kind of run.

    The ranks trained without a stop, from their own checkpoint, and from the checkpoint of one process.
    """
    folder = tmp_path_factory.mktemp("ranks")
    training = train_alone(range(STEPS))
    training.save(folder / "by_one")
    script = str(ROOT / "tests" / "training" / "checkpoint_rank_script.py")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    ranks = [start_python([script, str(rank), "2", str(folder)], environment=environment) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=900)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return folder, torch.load(folder / "results.pt", weights_only=True)


def train_alone(steps: range, start: Path | None = None) -> TinyTraining:
    training = TinyTraining(1)
    if start is not None:
        training.load(start)
    for number in steps:
        training.step(number)
    return training


def check_close(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor.detach(), theirs[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_each_rank_writes_its_shards_once(rank_results: tuple[Path, dict[str, Tensors]]) -> None:
    folder = rank_results[0] / "by_ranks"
    check_tensor_files(folder)
    assert sorted(file.name for file in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", COUNTS]
    assert saved_shapes(folder) == saved_shapes(rank_results[0] / "by_one")
    assert saved_shapes(folder)["optimizer.0.weight.exp_avg"] == [7, 6]


def test_two_ranks_resume_their_checkpoint_bit_for_bit(rank_results: tuple[Path, dict[str, Tensors]]) -> None:
    """A checkpoint that was written during later steps holds the state at its beginning."""
    _, results = rank_results
    for name, tensor in results["never_stopped"].items():
        assert torch.equal(tensor, results["by_ranks"][name]), name


def test_one_process_resumes_the_checkpoint_of_two_ranks(rank_results: tuple[Path, dict[str, Tensors]]) -> None:
    folder, results = rank_results
    resumed = train_alone(range(STEPS, 2 * STEPS), folder / "by_ranks")
    check_close(resumed.tensors(), results["never_stopped"])
    check_close(resumed.tensors(), train_alone(range(2 * STEPS)).tensors())


def test_two_ranks_resume_the_checkpoint_of_one_process(rank_results: tuple[Path, dict[str, Tensors]]) -> None:
    check_close(train_alone(range(2 * STEPS)).tensors(), rank_results[1]["by_one"])
