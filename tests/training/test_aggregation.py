"""Sums over tokens, rows and processes: every aggregation by hand, and of two processes as of one."""

import os
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from config.policy import AGGREGATIONS, PolicyConfig
from tests.training.loss_batches import VARIANTS, WIDTH, evaluate, make
from training.aggregation import BatchTotals, aggregate
from training.loss_metrics import all_reduce_metrics, finalize_metrics

SUMS = (2.0, 7.0, 0.0)
"""Of the values of three rows with 3, 1 and 0 tokens, 4 wide."""
BY_HAND: dict[str, tuple[dict[str, float], float]] = {
    "token_mean": ({}, 9 / 4),
    "sequence_mean": ({}, (2 / 3 + 7 / 1) / 2),
    "sequence_mean, empty rows too": ({"count_empty": True}, (2 / 3 + 7 / 1) / 3),
    "sequence_mean, one token more": ({"length_epsilon": 1.0}, (2 / 4 + 7 / 2) / 2),
    "sequence_sum": ({}, 9 / 2),
    "constant_length": ({}, 9 / (2 * 4)),
    "constant_length, of ten": ({"constant_length": 10}, 9 / (2 * 10)),
    "constant_length_sum": ({}, 9 / 4),
    "pass_mean": ({"pass_size": 1}, (2 / 3 + 7 / 1 + 0) / 3),
    "pass_mean, of two rows": ({"pass_size": 2}, (9 / 4 + 0) / 2),
    "length_weighted": ({}, (3 * 2 + 1 * 7) / 12),
    "padded_mean": ({}, 9 / 12),
    "token_sum": ({}, 9.0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_every_aggregation_by_hand(case: str) -> None:
    how, (fields, expected) = case.split(",")[0], BY_HAND[case]
    policy = PolicyConfig(aggregation=how, **fields)  # type: ignore[arg-type]
    mask = torch.arange(4)[None] < torch.tensor([3, 1, 0])[:, None]
    values = torch.zeros(3, 4, dtype=torch.float64)
    values[:, 0] = torch.tensor(SUMS)
    totals = BatchTotals.of(policy, mask)
    assert aggregate(policy, how, values, mask, totals).item() == pytest.approx(expected)
    assert {name.split(",")[0] for name in BY_HAND} == set(AGGREGATIONS)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_of_one_token_is_its_value(aggregation: str) -> None:
    policy, mask = PolicyConfig(aggregation=aggregation), torch.ones(1, 1, dtype=torch.bool)
    totals = BatchTotals.of(policy, mask)
    assert aggregate(policy, aggregation, torch.tensor([[3.0]]), mask, totals) == 3.0


def test_the_totals_of_the_passes_meet_values_on_another_device() -> None:
    """The learner counts on the CPU and computes elsewhere: on the device that stores nothing, which mixes with the
    CPU no more than a GPU does."""
    policy, mask = PolicyConfig(aggregation="pass_mean", pass_size=2), torch.ones(4, 3, dtype=torch.bool)
    totals = BatchTotals.of(policy, mask)
    values = torch.zeros(4, 3, device="meta")
    assert aggregate(policy, "pass_mean", values, mask.to("meta"), totals).device.type == "meta"


Outcome = tuple[float, list[list[float]], dict[str, float]]
BY_WIDTH = ("constant_length", "constant_length_sum")


def _process(rank: int, folder: str, queue: "torch.multiprocessing.SimpleQueue") -> None:
    """Every aggregation on one of two processes; rank 0 sends what they have together."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    outcomes = {aggregation: _together(rank, aggregation, WIDTH) for aggregation in AGGREGATIONS}
    outcomes |= {f"{how}, narrow": _together(rank, how, (7, WIDTH)[rank]) for how in BY_WIDTH}
    if rank == 0:
        queue.put(outcomes)
    dist.destroy_process_group()


def _together(rank: int, aggregation: str, width: int) -> Outcome:
    policy = PolicyConfig(aggregation=aggregation, pass_size=2, **VARIANTS["everything"])
    tensors = make(seed=4)
    rows = slice(0, 4) if rank == 0 else slice(4, 10)
    mine = {name: value[rows, :width] for name, value in tensors.items()}
    totals = BatchTotals.of(policy, mine["mask"]).all_reduced(torch.device("cpu"))
    loss, slope, metrics = evaluate(policy, mine, totals)
    everything = torch.zeros_like(tensors["now"])
    everything[rows, :width] = slope
    dist.all_reduce(everything)
    dist.all_reduce(loss)
    return loss.item(), everything.tolist(), finalize_metrics(all_reduce_metrics(metrics))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    context = get_context("spawn")  # a fork would inherit the process group of an engine in this process
    queue = context.Queue()
    folder = str(tmp_path_factory.mktemp("two"))
    processes = [context.Process(target=_process, args=(rank, folder, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    outcomes = queue.get(timeout=120)
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return outcomes


@pytest.mark.parametrize("kind", [*AGGREGATIONS, *(f"{how}, narrow" for how in BY_WIDTH)])
def test_two_processes_give_the_gradient_of_one(kind: str, two_processes: dict[str, Outcome]) -> None:
    """`narrow`: the longest response of one process is shorter than that of the other."""
    loss, slope, numbers = two_processes[kind]
    aggregation = kind.removesuffix(", narrow")
    policy = PolicyConfig(aggregation=aggregation, pass_size=2, **VARIANTS["everything"])
    whole_loss, whole_gradient, metrics = evaluate(policy, make(seed=4))
    assert loss == pytest.approx(whole_loss.item(), rel=1e-12)
    torch.testing.assert_close(
        torch.tensor(slope, dtype=torch.float64), whole_gradient, rtol=1e-12, atol=1e-15
    )
    assert numbers == pytest.approx(finalize_metrics(metrics), rel=1e-12)
