"""Tests of vLLM's asynchronous scheduling: equal results, and no step under way at a push.

vLLM disables it on a CPU. The tests enable it again: its scheduler and its queue of steps run, and fakes that do
nothing replace CUDA's streams, which have nothing to order here.
"""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from envs.group import Sampling
from tests.rollout.conftest import StartEngine, tiny_llama
from torchgrpo.rollout.engines.interface import Request, Response, generate
from torchgrpo.rollout.engines.vllm_engine import VLLMEngine

REQUESTS = [Request(i, tuple(range(3, 9 + i)), 4, Sampling(max_tokens=12 + i), seed=i) for i in range(6)]
SEQUENCES = [list(range(3, 203))]


class NoOpStream:
    """Fake CUDA stream or event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def nothing(self, *_: Any) -> None: ...

    record = synchronize = wait = wait_event = wait_stream = nothing


@pytest.fixture(scope="module")
def ahead(start_engine: StartEngine) -> Iterator[VLLMEngine]:
    """Engine that schedules a step ahead."""
    pytest.importorskip("vllm")
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.__dict__["check_and_update_config"].__func__

    def switched_on(cls: Any, config: Any) -> None:
        usual(cls, config)
        config.scheduler_config.async_scheduling = True

    with ExitStack() as patched:
        how = {"Stream": NoOpStream, "Event": NoOpStream, "current_stream": NoOpStream, "stream": nullcontext}
        patched.enter_context(mock.patch.multiple(torch.cuda, **how))
        patched.enter_context(mock.patch.object(torch, "Event", NoOpStream))
        patched.enter_context(mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(switched_on)))
        engine = start_engine(async_scheduling=True, max_num_seqs=8)
        assert engine._llm.engine_core.engine_core.async_scheduling
        assert engine._llm.engine_core.engine_core.batch_queue is not None
        yield engine


def drain(engine: VLLMEngine) -> list[Response]:
    responses: list[Response] = []
    while engine.in_flight:
        responses += engine.step()
    return sorted(responses, key=lambda response: response.request_id)


def test_results_equal_those_of_synchronous_scheduling(ahead: VLLMEngine, start_engine: StartEngine) -> None:
    """Compares tokens, log-probs, versions and ends, with waiting requests and with scores afterwards."""
    plain = start_engine(max_num_seqs=8)
    for version in (1, 2):
        for engine in (plain, ahead):
            engine.load(tiny_llama(False, seed=version).state_dict().items(), version)
        answers = generate(ahead, REQUESTS)
        assert answers == generate(plain, REQUESTS)
        versions = {one for r in answers for c in r.completions for one in c.policy_versions}
        assert versions == {version}
        assert ahead.score(SEQUENCES) == plain.score(SEQUENCES)


def test_requests_in_flight_finish_with_their_old_weights(ahead: VLLMEngine) -> None:
    """A push of an overlapped run may come while requests are in flight."""
    ahead.load(tiny_llama(False, seed=1).state_dict().items(), 1)
    expected = generate(ahead, REQUESTS)
    for request in REQUESTS:
        ahead.submit(request)
    for _ in range(6):
        ahead.step()
    ahead.load(tiny_llama(False, seed=2).state_dict().items(), 2)
    assert drain(ahead) == expected


def test_no_step_is_under_way_at_a_push_or_a_sleep(ahead: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last answer, one more step with unused results may be queued."""
    core = ahead._llm.engine_core.engine_core
    under_way: list[int] = []
    reload = ahead._load_full_weights

    def record_load(weights: Any) -> None:
        under_way.append(len(core.batch_queue))
        reload(weights)

    monkeypatch.setattr(ahead, "_load_full_weights", record_load)
    monkeypatch.setattr(ahead._llm, "sleep", lambda level: under_way.append(len(core.batch_queue)))
    generate(ahead, REQUESTS)
    assert len(core.batch_queue) > 0
    ahead.load(tiny_llama(False).state_dict().items(), 3)
    generate(ahead, REQUESTS)
    ahead.sleep()
    assert under_way == [0, 0]
