"""Tests of partial pushes: constant tensors are transferred once, and engines have all weights."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.local_policy import LocalPolicy
from tests.rollout.conftest import EOS, OpenPool, lora_policy, score_single_engine, tiny_llama, tiny_settings
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import WeightTarget
from torchgrpo.rollout.engines.transformers_engine import TransformersEngine
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.weights.host_weight_copy import HostWeightCopy, WeightTransport
from torchgrpo.rollout.weights.transports.object_store import ObjectStore
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import LiveEngines, TransferSize, WeightUpdate, _module_name, nbytes
from torchgrpo.training.published_weights import PolicyWeights, make_tensors, named_weights

needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")
SEQUENCES = [list(range(3, 203)), list(range(40, 90))]


def change_trained_parameters(model: Any) -> None:
    """Changes every trained parameter of a model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def frozen_embeddings(tied: bool) -> Any:
    model = tiny_llama(tied, seed=4)
    model.get_input_embeddings().requires_grad_(False)
    return model


def size_of(learner: PolicyWeights, *ends: str) -> int:
    """Returns the bytes of the tensors with such names, tied tensors counted once."""
    found = {one.identity: nbytes(one) for one in learner.publish() if one.name.endswith(ends or ("",))}
    return sum(found.values())


def push(learner: PolicyWeights, target: WeightTarget, version: int) -> int:
    """Pushes weights; returns the bytes transferred."""
    weight_update = WeightUpdate(learner.publish())
    target.load(weight_update, version)
    return weight_update.transfer_size.bytes


def assert_same_scores(target: WeightTarget, learner: PolicyWeights) -> None:
    expected = learner.score(SEQUENCES)
    for scores in target.score(SEQUENCES).values():
        for found, wanted in zip(scores.log_probs, expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(params=["shared memory", "object store"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostWeightCopy]:
    """Host copy in shared memory, or in a fake Ray object store."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value: value)
    made: HostWeightCopy = SharedMemory() if request.param == "shared memory" else ObjectStore()
    yield made
    made.close()


def test_of_merged_adapters_only_the_adapted_matrices_are_written(tied: bool, memory: HostWeightCopy) -> None:
    policy = lora_policy(tied)
    learner = PolicyWeights(policy, named_weights)
    adapted = size_of(learner, "q_proj.weight", "down_proj.weight")
    for expected in (size_of(learner), adapted, adapted):
        weight_update = WeightUpdate(learner.publish())
        arrived = memory.write(weight_update).open()
        assert weight_update.transfer_size.bytes == expected
        assert [name for name, _ in arrived] == [name for name, _ in weight_update]
        there = make_tensors(learner.publish())
        assert all(torch.equal(tensor, there[name]) for name, tensor in arrived)
        change_trained_parameters(policy)


def test_a_resumed_learner_writes_all_tensors_once(memory: HostWeightCopy) -> None:
    policy = lora_policy()
    for _ in range(2):
        learner = PolicyWeights(policy, named_weights)  # as a resumed process makes it
        for expected in (size_of(learner), size_of(learner, "q_proj.weight", "down_proj.weight")):
            weight_update = WeightUpdate(learner.publish())
            memory.write(weight_update)
            assert weight_update.transfer_size.bytes == expected


def test_module_names_of_tensors() -> None:
    parts = ("lm_head", "model.norm", "model.layers.0.mlp", "model.layers.0.mlp.experts.3.up_proj")
    kinds = [{_module_name(f"{module}.{kind}") for kind in ("weight", "bias")} for module in parts]
    assert kinds == [{"lm_head"}, {"model.norm"}, {"model.layers.0.mlp"}, {"model.layers.0.mlp"}]


def test_other_shapes_overwrite_everything() -> None:
    """Changed offsets in the buffer invalidate all stored tensors of the earlier push."""
    memory, learner = SharedMemory(), PolicyWeights(frozen_embeddings(False), named_weights)
    memory.write(WeightUpdate(learner.publish()))
    tensors = learner.publish()
    handle = memory.write(WeightUpdate([*tensors[1:], tensors[0]]))
    expected = make_tensors(tensors)
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
        change_trained_parameters(policy)


def test_a_complete_push_follows_a_failed_one() -> None:
    learner = PolicyWeights(frozen_embeddings(False), named_weights)
    engine = TransformersEngine(tiny_llama(False, seed=9), [EOS])
    whole = push(learner, engine, 0)
    assert push(learner, engine, 1) < whole
    with pytest.raises(KeyError, match="tensors unchanged"):
        engine.load(WeightUpdate(learner.publish()[:-1]), 2)
    assert push(learner, engine, 3) == whole


@pytest.mark.long
def test_an_engine_that_replaces_a_lost_one_has_all_weights(open_pool: OpenPool) -> None:
    policy = lora_policy()
    learner = LocalPolicy(policy, named_weights)
    pool = open_pool(lambda: TransformersEngine(tiny_llama(False, seed=9), [EOS]), engines=2)
    transfer_size = []
    for version in range(2):
        transfer_size.append(push(learner, pool, version))
        change_trained_parameters(policy)
    assert transfer_size[1] < transfer_size[0]
    transfer_size.append(push(learner, pool, 2))
    os.kill(pool.supervisor.engine_pids[0], signal.SIGKILL)
    pool.score([[1, 2]])
    pool.supervisor.wait_for_all_engines()
    assert_same_scores(pool, learner)
    change_trained_parameters(policy)
    assert push(learner, pool, 3) == transfer_size[2] == transfer_size[1]
    assert_same_scores(pool, learner)
    assert len(pool.supervisor.live) == 2


@pytest.mark.parametrize("adapters", [False, True], ids=["frozen embeddings", "adapters"])
def test_into_a_vllm_engine(vllm_engine: VLLMEngine, tied: bool, adapters: bool) -> None:
    """Matrices that vLLM stacks with an adapted matrix are pushed with it.

    These are all matrices of an attention or of an MLP.
    """
    policy = lora_policy(tied) if adapters else frozen_embeddings(tied)
    learner = PolicyWeights(policy, named_weights)
    transfer_size = []
    for version in range(3):
        transfer_size.append(push(learner, vllm_engine, version))
        assert_same_scores(vllm_engine, learner)
        change_trained_parameters(policy)
    stacked = ("_proj.weight",) if adapters else ("_proj.weight", "norm.weight")
    head = 0 if adapters or tied else size_of(learner, "lm_head.weight")
    assert transfer_size[1] == transfer_size[2] == size_of(learner, *stacked) + head
    assert transfer_size[0] == sum(nbytes(tensor) for tensor in learner.publish())


def test_in_place_writes_equal_vllms_reload(vllm_engine: VLLMEngine, tied: bool) -> None:
    model = tiny_llama(tied, seed=6)
    vllm_engine.load(model.state_dict().items(), 1)
    ours = score_single_engine(vllm_engine, SEQUENCES)
    vllm_engine.load(tiny_llama(tied).state_dict().items(), 2)
    assert score_single_engine(vllm_engine, SEQUENCES) != ours
    with torch.no_grad():
        vllm_engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(model.state_dict().items())})
    vllm_engine._set_version(3)
    assert score_single_engine(vllm_engine, SEQUENCES) == ours
    vllm_engine.load(model.state_dict().items(), 4)
    assert score_single_engine(vllm_engine, SEQUENCES) == ours


def test_one_shard_of_a_stacked_matrix_is_refused(vllm_engine: VLLMEngine, tied: bool) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    before = score_single_engine(vllm_engine, SEQUENCES)
    with pytest.raises(RuntimeError, match=r"only some shards of 1 matrices: \['model.layers.0.self_attn.qkv_proj'\]"):
        vllm_engine._llm.collective_rpc("receive_pushed_weights", args=([(name, tiny_llama(tied).state_dict()[name])],))
    assert score_single_engine(vllm_engine, SEQUENCES) == before


def test_subsets_of_a_push_share_the_transfer_size() -> None:
    transfer_size = TransferSize()
    weight_update = WeightUpdate(named_weights(tiny_llama(False)), transfer_size=transfer_size)
    dict(weight_update)
    dict(weight_update.missing_tensors({}))
    assert transfer_size.bytes == 2 * sum(map(nbytes, weight_update.tensors))


@pytest.mark.long
@needs_vllm
def test_through_vllms_own_transfer(
    open_pool: OpenPool, tiny_folders: dict[bool, Path], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that replaces a lost one takes all tensors."""
    from tests.rollout.mapped_backend import MAPPED_BACKEND, MappedTransfer, start_engine

    direct, pushed_names = MappedTransfer(MAPPED_BACKEND, timeout=600), []
    send = direct.push

    def record_push(weights: WeightUpdate, version: int, engines: LiveEngines) -> None:
        pushed_names.append(weights.names)
        send(weights, version, engines)

    monkeypatch.setattr(direct, "push", record_push)
    settings = replace(tiny_settings(tiny_folders[tied]), weight_transfer=MAPPED_BACKEND)
    policy = lora_policy(tied)
    learner = LocalPolicy(policy, named_weights)
    pool = open_pool(lambda: start_engine(settings), transport=WeightTransport(SharedMemory(), direct))
    for version in range(2):
        push(learner, pool, version)
        assert_same_scores(pool, learner)
        change_trained_parameters(policy)
    os.kill(pool.supervisor.engine_pids[0], signal.SIGKILL)
    pool.score([[1, 2]])
    push(learner, pool, 2)
    assert_same_scores(pool, learner)
    everything = {tensor.name for tensor in learner.publish()}
    assert pushed_names == [everything, {name for name in everything if "_proj" in name}, everything]
