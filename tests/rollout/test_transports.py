"""Tests of weight transports: shared memory, a real engine, and vLLM's transfer API."""

import gc
import importlib
import mmap
import os
import pickle
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from envs.group import Sampling
from tests.rollout.conftest import StartEngine, lora_policy, score_single_engine, tiny_llama
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_process import import_in_thread
from torchgrpo.rollout.weights.host_weight_copy import WeightLayout
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.rollout.weights.weight_update import WeightUpdate
from torchgrpo.training.published_weights import PolicyTensor, make_tensors, named_weights

PROJECT = Path(__file__).resolve().parents[2]
needs_vllm = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed")


# --- bytes ------------------------------------------------------------------------------------------------


def test_a_layout_keeps_every_value_and_stores_tied_tensors_once() -> None:
    shared = torch.randn(7, 5)
    weights = {
        "a": shared,
        "b": torch.randn(3).to(torch.bfloat16),
        "alias": shared,
        "transposed": shared.T,
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    layout = WeightLayout.from_update(WeightUpdate.from_pairs(weights.items()))
    assert len(layout.stored_tensors) == 5
    buffer = mmap.mmap(-1, layout.size)
    layout.write(buffer)
    for entry in layout.entries:
        assert entry.offset % 64 == 0
        assert torch.equal(entry.view(buffer), weights[entry.name])
        assert entry.view(buffer).dtype == weights[entry.name].dtype


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_push_holds_one_merged_tensor_at_a_time(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds during layout and write, also with a cast."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = merged = 0
    make = PolicyTensor.make

    def make_and_count(policy_tensor: PolicyTensor) -> torch.Tensor:
        nonlocal most, merged
        tensor = make(policy_tensor)
        if policy_tensor.layer is not None:
            alive.add(tensor)
            most, merged = max(most, len(alive)), merged + 1
        return tensor

    monkeypatch.setattr(PolicyTensor, "make", make_and_count)
    memory = SharedMemory()
    memory.write(WeightUpdate(named_weights(lora_policy(tied), torch.bfloat16)))
    memory.close()
    assert merged == 4
    assert most == 1


def test_a_cast_push_has_two_bytes_per_parameter_and_tied_tensors_once() -> None:
    policy = lora_policy(True)
    layout = WeightLayout.from_update(WeightUpdate(named_weights(policy, torch.bfloat16)))
    buffer = mmap.mmap(-1, layout.size)
    layout.write(buffer)
    parameters = sum(parameter.numel() for parameter in tiny_llama(True).parameters())
    assert 2 * parameters <= layout.size < 2 * parameters + 64 * len(layout.entries)
    expected = make_tensors(named_weights(policy))
    for entry in layout.entries:
        assert torch.equal(entry.view(buffer), expected[entry.name].to(torch.bfloat16))


READ = """
import pickle, sys
handle = pickle.load(sys.stdin.buffer)
print({name: tensor.sum().item() for name, tensor in handle.open()})
"""


def open_weights() -> int:
    """Returns the number of files of pushed weights that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:grpo_weights" in link for link in links)


def test_another_process_reads_each_push_and_leaves_nothing() -> None:
    before = open_weights()
    seen: list[str] = []

    memory = SharedMemory()
    for size, value in ((4, 2.0), (64, 0.5), (8, 1.0)):
        handle = memory.write(WeightUpdate.from_pairs([("w", torch.full((size, size), value))]))
        command, given = [sys.executable, "-c", READ], pickle.dumps(handle)
        run = subprocess.run(command, input=given, capture_output=True, cwd=PROJECT, timeout=900)
        seen.append(run.stdout.decode().strip())
    assert seen == ["{'w': 32.0}", "{'w': 2048.0}", "{'w': 64.0}"]
    assert open_weights() > before
    memory.close()
    assert open_weights() == before


# --- into the real engine ---------------------------------------------------------------------------------


def scores_of(model: Any, sequence: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]


class SingleLiveEngine:
    """Fake pool with one engine in this process, for direct transfers."""

    engine_pids = (0,)

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        (mine,) = arguments
        return [getattr(self.engine, method)(**mine)]

    def stacks(self) -> str:
        return ""


@needs_vllm
def test_the_native_api_with_requests_in_flight(start_engine: StartEngine) -> None:
    from tests.rollout.mapped_backend import register_backend
    from torchgrpo.rollout.weights import vllm_weight_transfer

    register_backend()
    engine, sequence = start_engine(True, weight_transfer="mapped"), list(range(3, 203))
    transfer = vllm_weight_transfer.VLLMWeightTransfer("mapped", timeout=600)
    engine.score([sequence])
    engine.submit(Request(1, (5, 6, 7), 2, Sampling(max_tokens=8), seed=1))
    engine.step()
    for version in (1, 2):
        model = tiny_llama(True, seed=version)
        transfer.push(WeightUpdate(named_weights(model)), version, SingleLiveEngine(engine))
        assert engine.policy_version == version
        torch.testing.assert_close(
            torch.tensor(score_single_engine(engine, [sequence])[0]), scores_of(model, sequence), atol=1e-4, rtol=0
        )
    responses: list[Response] = []
    while engine.in_flight:
        responses += engine.step()
    versions = responses[0].completions[0].policy_versions
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[-1] == 2
    transfer.close()


@needs_vllm
def test_a_native_push_that_nobody_takes_ends_by_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from torchgrpo.rollout.weights import vllm_weight_transfer

    monkeypatch.setitem(vllm_weight_transfer.TRAINER_INIT, "mapped", lambda end: threading.Event().wait())

    class SilentEngines:
        engine_pids = (1, 2)

        def stacks(self) -> str:
            return "--- engine 0: in ncclBroadcast"

    transfer = vllm_weight_transfer.VLLMWeightTransfer("mapped", timeout=0.2)
    message = r"in ncclBroadcast\nthe learner waited 0 s \(inference_model.request_timeout_s\) for 2 engines to receive"
    with pytest.raises(TimeoutError, match=message):
        transfer.push(WeightUpdate.from_pairs([("w", torch.ones(1))]), 1, SilentEngines())  # type: ignore[arg-type]


@needs_vllm
def test_each_engines_workers_get_their_own_ranks() -> None:
    from torchgrpo.rollout.weights.vllm_weight_transfer import _EngineClient

    class ThreeEngines:
        engine_pids = (10, 11, 12)
        calls: ClassVar[list[Any]] = []

        def call_each(self, method: str, arguments: Any) -> list[Any]:
            self.calls.append([one["init_info"]["rank_offset"] for one in arguments])
            return []

    targets = ThreeEngines()
    client = _EngineClient(workers_per_engine=2)
    client.engines = targets  # type: ignore[assignment]
    client.init_weight_transfer_engine({"rank_offset": 1})
    assert targets.calls == [[1, 3, 5]]


# --- imports ----------------------------------------------------------------------------------------------

FAILING_IMPORT = """
try:
    import a_package_that_is_not_there
except ImportError as error:
    failed = error
"""


@pytest.mark.parametrize(("in_thread", "is_kept"), [(False, True), (True, False)])
def test_an_import_in_a_thread_keeps_no_frame_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_thread: bool, is_kept: bool
) -> None:
    """vLLM keeps exceptions of failed imports, and with them the frames of the importing run."""
    name = f"keeps_what_failed_{in_thread}"
    (tmp_path / f"{name}.py").write_text(FAILING_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)

    def begin_a_run() -> weakref.ref[torch.nn.Module]:
        model = torch.nn.Linear(1, 1)
        module = import_in_thread(name) if in_thread else importlib.import_module(name)
        assert module.failed.name == "a_package_that_is_not_there"
        return weakref.ref(model)

    model = begin_a_run()
    gc.collect()
    assert (model() is not None) == is_kept
    del sys.modules[name]
