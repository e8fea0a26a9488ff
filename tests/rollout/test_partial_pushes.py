"""What never changes is moved with the first push alone, and every engine has all weights all the same."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policies import PolicyHere
from tests.rollout.conftest import EOS, OpenPool, lora_policy, scores_of_one, tiny_llama, tiny_settings
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.weights.host_copy import HostCopy, Transport
from torchgrpo.rollout.weights.outgoing import Engines, Outgoing, Tally, _part, nbytes
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.published_weights import PolicyWeights, made, named_weights

needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SEQUENCES = [list(range(3, 203)), list(range(40, 90))]


def step(model: Any) -> None:
    """Every trained parameter moves."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def frozen_embeddings(tied: bool) -> Any:
    model = tiny_llama(tied, seed=4)
    model.get_input_embeddings().requires_grad_(False)
    return model


def size_of(learner: PolicyWeights, *ends: str) -> int:
    """Bytes of the tensors with such names, what is tied once."""
    found = {one.identity: nbytes(one) for one in learner.publish() if one.name.endswith(ends or ("",))}
    return sum(found.values())


def push(learner: PolicyWeights, target: WeightTarget, version: int) -> int:
    """Returns bytes moved."""
    outgoing = Outgoing(learner.publish())
    target.load(outgoing, version)
    return outgoing.moved.bytes


def assert_same_scores(target: WeightTarget, learner: PolicyWeights) -> None:
    expected = learner.score(SEQUENCES)
    for scores in target.score(SEQUENCES).values():
        for found, wanted in zip(scores.log_probs, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(params=["shared memory", "object store"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCopy]:
    """Ray's store keeps what it is given."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    made: HostCopy = SharedMemory() if request.param == "shared memory" else ObjectStore()
    yield made
    made.close()


def test_of_merged_adapters_only_the_adapted_matrices_are_written(tied: bool, memory: HostCopy) -> None:
    policy = lora_policy(tied)
    learner = PolicyWeights(policy, named_weights)
    adapted = size_of(learner, "q_proj.weight", "down_proj.weight")
    for expected in (size_of(learner), adapted, adapted):
        outgoing = Outgoing(learner.publish())
        arrived = memory.write(outgoing).open()
        assert outgoing.moved.bytes == expected
        assert [name for name, _ in arrived] == [name for name, _ in outgoing]
        there = made(learner.publish())
        assert all(torch.equal(tensor, there[name]) for name, tensor in arrived)
        step(policy)


def test_a_learner_that_went_on_from_a_checkpoint_writes_everything_once(memory: HostCopy) -> None:
    policy = lora_policy()
    for _ in range(2):
        learner = PolicyWeights(policy, named_weights)  # as the process that resumes makes it
        for expected in (size_of(learner), size_of(learner, "q_proj.weight", "down_proj.weight")):
            outgoing = Outgoing(learner.publish())
            memory.write(outgoing)
            assert outgoing.moved.bytes == expected


def test_the_tensors_of_a_module_are_one_part() -> None:
    parts = ("lm_head", "model.norm", "model.layers.0.mlp", "model.layers.0.mlp.experts.3.up_proj")
    kinds = [{_part(f"{module}.{kind}") for kind in ("weight", "bias")} for module in parts]
    assert kinds == [{"lm_head"}, {"model.norm"}, {"model.layers.0.mlp"}, {"model.layers.0.mlp"}]


def test_other_shapes_overwrite_everything() -> None:
    """Where places in memory move, nothing of the push before counts as there."""
    memory, learner = SharedMemory(), PolicyWeights(frozen_embeddings(False), named_weights)
    memory.write(Outgoing(learner.publish()))
    tensors = learner.publish()
    handle = memory.write(Outgoing([*tensors[1:], tensors[0]]))
    expected = made(tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in handle.open())
    memory.close()


@pytest.mark.parametrize("adapters", [False, True], ids=["frozen embeddings", "adapters"])
def test_into_a_transformers_engine(tied: bool, adapters: bool) -> None:
    policy = lora_policy(tied) if adapters else frozen_embeddings(tied)
    learner = PolicyWeights(policy, named_weights)
    engine = TransformersEngine(tiny_llama(tied, seed=9), [EOS])
    whole = sum(nbytes(tensor) for tensor in learner.publish())
    constant = sum(nbytes(tensor) for tensor in learner.publish() if tensor.constant is not None)
    assert 0 < constant < whole
    for version, expected in ((0, whole), (1, whole - constant)):
        assert push(learner, engine, version) == expected
        assert_same_scores(engine, learner)
        step(policy)


def test_a_push_that_broke_off_is_followed_by_a_whole_one() -> None:
    learner = PolicyWeights(frozen_embeddings(False), named_weights)
    engine = TransformersEngine(tiny_llama(False, seed=9), [EOS])
    whole = push(learner, engine, 0)
    assert push(learner, engine, 1) < whole
    with pytest.raises(KeyError, match="tensors unchanged"):
        engine.load(Outgoing(learner.publish()[:-1]), 2)
    assert push(learner, engine, 3) == whole


@pytest.mark.long
def test_an_engine_that_replaces_a_lost_one_has_all_weights(open_pool: OpenPool) -> None:
    policy = lora_policy()
    learner = PolicyHere(policy, named_weights)
    pool = open_pool(lambda: TransformersEngine(tiny_llama(False, seed=9), [EOS]), engines=2)
    moved = []
    for version in range(2):
        moved.append(push(learner, pool, version))
        step(policy)
    assert moved[1] < moved[0]
    moved.append(push(learner, pool, 2))
    os.kill(pool.supervisor.members[0], signal.SIGKILL)
    pool.score([[1, 2]])
    pool.supervisor.wait_for_every()
    assert_same_scores(pool, learner)
    step(policy)
    assert push(learner, pool, 3) == moved[2] == moved[1]
    assert_same_scores(pool, learner)
    assert len(pool.supervisor.live) == 2


@pytest.mark.parametrize("adapters", [False, True], ids=["frozen embeddings", "adapters"])
def test_into_a_vllm_engine(vllm_engine: VLLMEngine, tied: bool, adapters: bool) -> None:
    """What is stacked with an adapted matrix goes with it: all of an attention, all of an MLP."""
    policy = lora_policy(tied) if adapters else frozen_embeddings(tied)
    learner = PolicyWeights(policy, named_weights)
    moved = []
    for version in range(3):
        moved.append(push(learner, vllm_engine, version))
        assert_same_scores(vllm_engine, learner)
        step(policy)
    stacked = ("_proj.weight",) if adapters else ("_proj.weight", "norm.weight")
    head = 0 if adapters or tied else size_of(learner, "lm_head.weight")
    assert moved[1] == moved[2] == size_of(learner, *stacked) + head
    assert moved[0] == sum(nbytes(tensor) for tensor in learner.publish())


def test_written_in_place_is_as_vllm_reloads(vllm_engine: VLLMEngine, tied: bool) -> None:
    model = tiny_llama(tied, seed=6)
    vllm_engine.load(model.state_dict().items(), 1)
    ours = scores_of_one(vllm_engine, SEQUENCES)
    vllm_engine.load(tiny_llama(tied).state_dict().items(), 2)
    assert scores_of_one(vllm_engine, SEQUENCES) != ours
    with torch.no_grad():
        vllm_engine._llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(model.state_dict().items())}
        )
    vllm_engine._set_version(3)
    assert scores_of_one(vllm_engine, SEQUENCES) == ours
    vllm_engine.load(model.state_dict().items(), 4)
    assert scores_of_one(vllm_engine, SEQUENCES) == ours


def test_one_shard_of_a_stacked_matrix_is_refused(vllm_engine: VLLMEngine, tied: bool) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    before = scores_of_one(vllm_engine, SEQUENCES)
    with pytest.raises(
        RuntimeError, match=r"some shards of 1 matrices only: \['model.layers.0.self_attn.qkv_proj'\]"
    ):
        vllm_engine._llm.collective_rpc("receive", args=([(name, tiny_llama(tied).state_dict()[name])],))
    assert scores_of_one(vllm_engine, SEQUENCES) == before


def test_parts_of_a_push_count_together() -> None:
    moved = Tally()
    outgoing = Outgoing(named_weights(tiny_llama(False)), moved=moved)
    dict(outgoing)
    dict(outgoing.beyond({}))
    assert moved.bytes == 2 * sum(map(nbytes, outgoing.tensors))


@pytest.mark.long
@needs_vllm
def test_through_vllms_own_transfer(
    open_pool: OpenPool, tiny_folders: dict[bool, Path], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an engine that comes in the place of a lost one takes everything."""
    from tests.rollout.mapped_backend import MAPPED, MappedTransfer, start_engine

    direct, carried = MappedTransfer(MAPPED, timeout=600), []
    send = direct.push

    def noted(weights: Outgoing, version: int, engines: Engines) -> None:
        carried.append(weights.names)
        send(weights, version, engines)

    monkeypatch.setattr(direct, "push", noted)
    settings = replace(tiny_settings(tiny_folders[tied]), weight_transfer=MAPPED)
    policy = lora_policy(tied)
    learner = PolicyHere(policy, named_weights)
    pool = open_pool(lambda: start_engine(settings), transport=Transport(SharedMemory(), direct))
    for version in range(2):
        push(learner, pool, version)
        assert_same_scores(pool, learner)
        step(policy)
    os.kill(pool.supervisor.members[0], signal.SIGKILL)
    pool.score([[1, 2]])
    push(learner, pool, 2)
    assert_same_scores(pool, learner)
    everything = {tensor.name for tensor in learner.publish()}
    assert carried == [everything, {name for name in everything if "_proj" in name}, everything]
