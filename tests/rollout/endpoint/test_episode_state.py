"""Tests of keys, reported rewards, metrics and the address of the endpoint."""

import asyncio
import socket
from typing import Any

import pytest

from config.schema.errors import ConfigError
from envs.agents.results import AgentResult
from tests.rollout.endpoint.strict_conversation import (
    HELLO,
    Service,
    StrictConversation,
    decode_bytes,
    run_with_service,
)
from torchgrpo.rollout.endpoint.server import Endpoint

REWARD_PATH = "/episode/reward"


def test_each_key_reaches_its_own_conversation() -> None:
    async def use(service: Service) -> None:
        other = StrictConversation({"role": "assistant", "content": "other"})
        key = service.endpoint.open_episode(other)
        _, reply = await service.post({"messages": HELLO}, key=key)
        assert reply["choices"][0]["message"]["content"] == "other"
        await service.check_next_request()
        assert (len(service.conversation.requests), len(other.requests)) == (1, 1)
        service.endpoint.close_episode(key)
        assert (await service.post({"messages": HELLO}, key=key))[0] == 410
        await service.check_next_request()

    run_with_service(use)


def test_the_last_reported_reward_is_that_of_the_episode() -> None:
    async def use(service: Service) -> Any:
        await service.post({"reward": 0.25}, REWARD_PATH)
        status, reply = await service.post({"reward": 1, "components": {"format": 0.5}}, REWARD_PATH)
        assert (status, reply) == (200, {"reward": 1.0, "components": {"format": 0.5}})
        return service.endpoint.close_episode(service.key)

    assert run_with_service(use) == AgentResult(1.0, {"format": 0.5})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": True},
        {"reward": "1"},
        {"reward": None},
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        b'{"reward": Infinity}',
        {"reward": 1, "components": [1]},
        {"reward": 1, "components": {"a": "b"}},
        {"reward": 1, "components": {"": 1}},
        {"reward": 1, "components": {"x" * 101: 1}},
        {"reward": 1, "components": {str(number): 1 for number in range(65)}},
        {"reward": 1e39},
        {"reward": 1, "components": {"a": -1e39}},
        {"reward": 1, "components": {"mean": 1}},
        {"reward": 1, "score": 1},
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused(body: object) -> None:
    async def use(service: Service) -> None:
        await service.post({"reward": 0.5}, REWARD_PATH)
        status, reply = await service.post(body, REWARD_PATH)
        assert status == 400, reply
        assert service.endpoint.close_episode(service.key) == AgentResult(0.5, {})

    run_with_service(use)


def test_a_failure_of_the_policy_is_raised_where_the_episode_closes() -> None:
    async def use(service: Service) -> None:
        service.conversation.error = RuntimeError("the engine is lost")
        status, reply = await service.post({"messages": HELLO})
        assert status == 500
        assert "engine is lost" not in reply["error"]["message"]
        with pytest.raises(RuntimeError, match="the engine is lost"):
            service.endpoint.close_episode(service.key)
        assert (await service.post({"messages": HELLO}))[0] == 410

    run_with_service(use)


def test_metrics_count_requests_since_the_last_call() -> None:
    async def use(service: Service) -> Any:
        await service.post({"messages": HELLO})
        await service.post({"messages": HELLO}, key="sk-other")
        await service.post({"messages": []})
        return service.endpoint.metrics(), service.endpoint.metrics()

    first, second = run_with_service(use)
    assert (first["endpoint/requests"], first["endpoint/refused"]) == (3.0, 2.0)
    assert 0 < first["endpoint/overhead_s"] < 60
    assert second == {"endpoint/requests": 0.0, "endpoint/refused": 0.0, "endpoint/overhead_s": 0.0}


def test_a_port_in_use_is_refused_with_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*in use"):
            asyncio.run(Endpoint(decode_bytes, port=port).start())


def test_the_endpoint_listens_on_loopback_only() -> None:
    async def use(service: Service) -> None:
        assert service.endpoint.url == f"http://127.0.0.1:{service.port}/v1"
        assert [one.getsockname()[0] for one in service.endpoint._listener.sockets] == ["127.0.0.1"]

    run_with_service(use)
