"""Checkpoints of two gloo processes with FSDP2, and of one process, from which the others go on."""

from pathlib import Path

import pytest
import torch

from tests.scripts import ENVIRONMENT, ROOT, begin
from tests.training.ranks_that_save import COUNTS, STEPS, Learning
from torchgrpo.training.checkpoint_tensors import check_files, saved_shapes

pytestmark = pytest.mark.long

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    """What two ranks wrote and how they ended: never stopped, and from what they wrote and one process wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    learning = alone(range(STEPS))
    learning.save(folder / "by_one")
    script = str(ROOT / "tests" / "training" / "ranks_that_save.py")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    ranks = [begin([script, str(rank), "2", str(folder)], environment=environment) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=900)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return folder, torch.load(folder / "ends.pt", weights_only=True)


def alone(steps: range, start: Path | None = None) -> Learning:
    learning = Learning(1)
    if start is not None:
        learning.load(start)
    for number in steps:
        learning.step(number)
    return learning


def check_close(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor.detach(), theirs[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_each_rank_writes_its_part_once(ended: tuple[Path, dict[str, Tensors]]) -> None:
    folder = ended[0] / "by_ranks"
    check_files(folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        COUNTS,
    ]
    assert saved_shapes(folder) == saved_shapes(ended[0] / "by_one")
    assert saved_shapes(folder)["optimizer.0.weight.exp_avg"] == [7, 6]


def test_two_go_on_from_what_two_wrote_bit_for_bit(ended: tuple[Path, dict[str, Tensors]]) -> None:
    """What they wrote while they went on is what was there when they began to write."""
    _, ends = ended
    for name, tensor in ends["never_stopped"].items():
        assert torch.equal(tensor, ends["by_ranks"][name]), name


def test_one_goes_on_from_what_two_wrote(ended: tuple[Path, dict[str, Tensors]]) -> None:
    folder, ends = ended
    again = alone(range(STEPS, 2 * STEPS), folder / "by_ranks")
    check_close(again.tensors(), ends["never_stopped"])
    check_close(again.tensors(), alone(range(2 * STEPS)).tensors())


def test_two_go_on_from_what_one_wrote(ended: tuple[Path, dict[str, Tensors]]) -> None:
    check_close(alone(range(2 * STEPS)).tensors(), ended[1]["by_one"])
