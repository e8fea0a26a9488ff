"""Tests learner ranks in `run=plan`: devices, microbatches, threads, and unavailable GPUs."""

import pytest

from tests.plan.test_plan import config_of, gpu_plan, machine, text_of
from torchgrpo.plan.make_plan import make_plan
from torchgrpo.plan.problems import find_problems

QWEN = "model.name=Qwen/Qwen2.5-3B-Instruct"


def test_ranks_in_the_report() -> None:
    text = text_of(gpu_plan(QWEN, "train_model.num_devices=4", "train_model.shard_size=2", gpus=5))
    for expected_line in (
        "train_model      4 ranks, parameters sharded in groups of 2: GPU 0, 1, 2, 3",
        "ref_model        learner ranks",
        "weights          travel by nccl in bfloat16",
        "128 completions = 4 ranks x 8 microbatches x 4; 4 steps per iteration",
    ):
        assert expected_line in text
    many = gpu_plan(QWEN, "train_model.num_devices=129", gpus=130)
    assert "128 completions, so 1 of 129 learner ranks are idle" in many.notes[0]


def test_prefetched_layers_are_at_most_those_of_the_model() -> None:
    """The quickstart's model has two layers."""
    counts = (2, 3, 100_000)
    overrides = [("train_model.num_devices=2", f"train_model.prefetch_layers={count}") for count in counts]
    plans = [make_plan(config_of("grpo_quickstart", *each), False, machine(0)) for each in overrides]
    few, more, many = ([phase.bytes for phase in plan.phases] for plan in plans)
    assert few == more == many


def test_ranks_share_the_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))

    def threads(*overrides: str, is_overlapped: bool = False) -> int | None:
        plan = make_plan(config_of("grpo_gsm8k", QWEN, "device=cpu", *overrides), is_overlapped, machine(0))
        return plan.learner.num_threads

    assert threads() is None
    assert threads(is_overlapped=True) == 7
    assert threads("train_model.num_devices=2") == 4
    assert threads("train_model.num_devices=2", is_overlapped=True) == 3
    assert threads("train_model.num_devices=16") == 1
    assert threads("train_model.num_devices=2", "train_model.num_threads=3") == 3


def test_requests_beyond_a_known_cluster() -> None:
    cluster = machine(8, 80.0, nodes=2, is_hypothetical=True)

    def problem_texts(*overrides: str) -> str:
        plan = make_plan(config_of("grpo_gsm8k", QWEN, *overrides), True, cluster)
        return " ".join(problem.text for problem in find_problems(plan))

    assert problem_texts("train_model.num_devices=8", "train_model.num_nodes=2") == ""
    assert "there are 2 nodes" in problem_texts("train_model.num_devices=8", "train_model.num_nodes=4")
    assert "12 ranks on a node, which has 8 GPUs" in problem_texts("train_model.num_devices=12")
