"""Weights on their way: bytes in shared memory, into a real engine, through vLLM's native transfer API."""

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
from tests.rollout.conftest import StartEngine, lora_policy, scores_of_one, tiny_llama
from torchgrpo.plan.machine import installed_vllm
from torchgrpo.rollout.engines.interface import Request, Response
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine
from torchgrpo.rollout.engines.vllm_settings import import_in_thread
from torchgrpo.rollout.weights.host_copy import Layout
from torchgrpo.rollout.weights.outgoing import Outgoing
from torchgrpo.rollout.weights.transports.shared_memory import SharedMemory
from torchgrpo.training.published_weights import PolicyTensor, made, named_weights

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
    layout = Layout.of(Outgoing.of(weights.items()))
    assert len(layout.stored) == 5
    buffer = mmap.mmap(-1, layout.size)
    layout.write(buffer)
    for entry in layout.entries:
        assert entry.offset % 64 == 0
        assert torch.equal(entry.view(buffer), weights[entry.name])
        assert entry.view(buffer).dtype == weights[entry.name].dtype


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_push_holds_one_merged_tensor_at_a_time(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while the bytes are laid out nor while they are written, also where tensors are cast on their way."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = merged = 0
    make = PolicyTensor.make

    def counted(published: PolicyTensor) -> torch.Tensor:
        nonlocal most, merged
        tensor = make(published)
        if published.layer is not None:
            alive.add(tensor)
            most, merged = max(most, len(alive)), merged + 1
        return tensor

    monkeypatch.setattr(PolicyTensor, "make", counted)
    memory = SharedMemory()
    memory.write(Outgoing(named_weights(lora_policy(tied), torch.bfloat16)))
    memory.close()
    assert merged == 4
    assert most == 1


def test_a_cast_push_has_two_bytes_a_parameter_and_what_is_tied_once() -> None:
    policy = lora_policy(True)
    layout = Layout.of(Outgoing(named_weights(policy, torch.bfloat16)))
    buffer = mmap.mmap(-1, layout.size)
    layout.write(buffer)
    parameters = sum(parameter.numel() for parameter in tiny_llama(True).parameters())
    assert 2 * parameters <= layout.size < 2 * parameters + 64 * len(layout.entries)
    expected = made(named_weights(policy))
    for entry in layout.entries:
        assert torch.equal(entry.view(buffer), expected[entry.name].to(torch.bfloat16))


READ = """
import pickle, sys
handle = pickle.load(sys.stdin.buffer)
print({name: tensor.sum().item() for name, tensor in handle.open()})
"""


def open_weights() -> int:
    """How many files of pushed weights this process holds."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:grpo_weights" in link for link in links)


def test_another_process_reads_each_push_and_nothing_stays() -> None:
    before = open_weights()
    seen: list[str] = []

    memory = SharedMemory()
    for size, value in ((4, 2.0), (64, 0.5), (8, 1.0)):
        handle = memory.write(Outgoing.of([("w", torch.full((size, size), value))]))
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


class OneEngine:
    """An engine in this process as all that a native push reaches."""

    members = (0,)

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def call_each(self, method: str, arguments: Any) -> list[Any]:
        (mine,) = arguments
        return [getattr(self.engine, method)(**mine)]

    def stacks(self) -> str:
        return ""


@needs_vllm
def test_the_native_api_with_requests_in_flight(
    start_engine: StartEngine,
) -> None:
    from tests.rollout.mapped_backend import register
    from torchgrpo.rollout.weights import vllm_transfer

    register()
    engine, sequence = start_engine(True, weight_transfer="mapped"), list(range(3, 203))
    transfer = vllm_transfer.NativeTransfer("mapped", timeout=600)
    engine.score([sequence])
    engine.submit(Request(1, (5, 6, 7), 2, Sampling(max_tokens=8), seed=1))
    engine.step()
    for version in (1, 2):
        model = tiny_llama(True, seed=version)
        transfer.push(Outgoing(named_weights(model)), version, OneEngine(engine))
        assert engine.policy_version == version
        torch.testing.assert_close(
            torch.tensor(scores_of_one(engine, [sequence])[0]), scores_of(model, sequence), atol=1e-4, rtol=0
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

    from torchgrpo.rollout.weights import vllm_transfer

    monkeypatch.setitem(vllm_transfer.INIT, "mapped", lambda end: threading.Event().wait())

    class Nobody:
        members = (1, 2)

        def stacks(self) -> str:
            return "--- engine 0: in ncclBroadcast"

    transfer = vllm_transfer.NativeTransfer("mapped", timeout=0.2)
    with pytest.raises(TimeoutError, match=r"in ncclBroadcast\nthe learner waited 0 s for 2 engines to take"):
        transfer.push(Outgoing.of([("w", torch.ones(1))]), 1, Nobody())  # type: ignore[arg-type]


@needs_vllm
def test_each_engines_workers_get_their_own_ranks() -> None:
    from torchgrpo.rollout.weights.vllm_transfer import _Client

    class Three:
        members = (10, 11, 12)
        calls: ClassVar[list[Any]] = []

        def call_each(self, method: str, arguments: Any) -> list[Any]:
            self.calls.append([one["init_info"]["rank_offset"] for one in arguments])
            return []

    targets = Three()
    client = _Client(workers_per_engine=2)
    client.engines = targets  # type: ignore[assignment]
    client.init_weight_transfer_engine({"rank_offset": 1})
    assert targets.calls == [[1, 3, 5]]


# --- imports ----------------------------------------------------------------------------------------------

KEEPS_WHAT_FAILED = """
try:
    import a_package_that_is_not_there
except ImportError as error:
    failed = error
"""


@pytest.mark.parametrize(("in_thread", "kept"), [(False, True), (True, False)])
def test_an_import_in_a_thread_keeps_nothing_of_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_thread: bool, kept: bool
) -> None:
    """vLLM keeps the exceptions of what it could not import, and these the frames of a run that imported it first."""
    name = f"keeps_what_failed_{in_thread}"
    (tmp_path / f"{name}.py").write_text(KEEPS_WHAT_FAILED)
    monkeypatch.syspath_prepend(tmp_path)

    def begin_a_run() -> weakref.ref[torch.nn.Module]:
        model = torch.nn.Linear(1, 1)
        module = import_in_thread(name) if in_thread else importlib.import_module(name)
        assert module.failed.name == "a_package_that_is_not_there"
        return weakref.ref(model)

    model = begin_a_run()
    gc.collect()
    assert (model() is not None) == kept
    del sys.modules[name]
