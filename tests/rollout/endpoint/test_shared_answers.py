"""Tests of requests that are sent twice, clients that go away, and episodes that close."""

import asyncio
import random
import sys
from typing import Any

import aiohttp
import pytest

from tests.rollout.endpoint.strict_conversation import HELLO, Service, run_with_service, wait_until

BODY = {"messages": HELLO}


async def post_and_vanish(service: Service, body: object = BODY) -> None:
    """Posts a request, and closes the connection while the turn is sampled."""
    num_before = len(service.conversation.requests)
    task = asyncio.create_task(service.post(body))
    await wait_until(lambda: len(service.conversation.requests) > num_before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_same_request_in_flight_is_sampled_once() -> None:
    async def use(service: Service) -> Any:
        service.conversation.gate.clear()
        tasks = [asyncio.create_task(service.post(BODY)) for _ in range(3)]
        other = asyncio.create_task(service.post(BODY | {"seed": 1}))
        await wait_until(lambda: num_clients(service) == [1, 3])
        service.conversation.gate.set()
        return await asyncio.gather(*tasks), await other, service.conversation.requests

    def num_clients(service: Service) -> list[int]:
        return sorted(answer.num_clients for answer in service.endpoint._episodes[service.key].answers.values())

    replies, other, requests = run_with_service(use)
    assert [status for status, _ in (*replies, other)] == [200] * 4
    assert len({reply["id"] for _, reply in replies}) == 1
    assert other[1]["id"] != replies[0][1]["id"]
    assert len(requests) == 2


def test_the_same_request_after_its_reply_is_sampled_again_unless_the_client_retries() -> None:
    async def use(service: Service) -> Any:
        first, second = await service.post(BODY), await service.post(BODY)
        retry = await service.post(BODY, **{"x-stainless-retry-count": "1"})
        return first[1]["id"], second[1]["id"], retry[1]["id"]

    first, second, retry = run_with_service(use)
    assert first != second
    assert retry == second


def test_a_client_that_goes_away_cancels_its_turn() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        await post_and_vanish(service, BODY | {"n": 2})
        await wait_until(lambda: service.conversation.num_cancelled == 2)
        assert service.conversation.num_in_flight == 0
        service.conversation.gate.set()
        await service.check_next_request()

    run_with_service(use)


def test_a_killed_client_cancels_its_turn() -> None:
    script = (
        "import sys, urllib.request as r; url, key = sys.argv[1:]; "
        'r.urlopen(r.Request(url, b\'{"messages": [{"role": "user", "content": "a"}]}\', {\'x-api-key\': key}))'
    )

    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        url = service.endpoint.url + "/chat/completions"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, url, service.key)
        await wait_until(lambda: service.conversation.num_in_flight == 1)
        process.kill()
        await process.wait()
        await wait_until(lambda: service.conversation.num_cancelled == 1)
        service.conversation.gate.set()
        await service.check_next_request()

    run_with_service(use)


def test_a_turn_goes_on_for_the_clients_that_stay() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        staying = asyncio.create_task(service.post(BODY))
        await wait_until(lambda: service.conversation.num_in_flight == 1)
        episode = service.endpoint._episodes[service.key]
        (answer,) = episode.answers.values()
        leaving = asyncio.create_task(service.post(BODY))
        await wait_until(lambda: answer.num_clients == 2)
        leaving.cancel()
        await wait_until(lambda: answer.num_clients == 1)
        service.conversation.gate.set()
        assert (await staying)[0] == 200
        assert service.conversation.num_cancelled == 0

    run_with_service(use)


def test_a_reply_that_reached_no_client_answers_the_same_request() -> None:
    async def use(service: Service) -> Any:
        send = service.endpoint._send

        async def fail_to_send(*arguments: Any) -> None:
            service.endpoint._send = send
            raise ConnectionResetError("Cannot write to closing transport")

        service.endpoint._send = fail_to_send
        with pytest.raises(aiohttp.ClientError):
            await service.post(BODY)
        status, _ = await service.post(BODY)
        assert status == 200
        assert len(service.conversation.requests) == 1
        await service.post(BODY)
        return service.conversation.requests

    assert len(run_with_service(use)) == 2


def test_an_error_of_one_choice_cancels_the_others() -> None:
    async def use(service: Service) -> None:
        conversation = service.conversation
        sample_turn = conversation.sample_turn
        conversation.gate.clear()

        async def fail_second(*arguments: Any, **options: Any) -> Any:
            if len(conversation.requests) == 1:
                raise RuntimeError("the engine failed")
            return await sample_turn(*arguments, **options)

        conversation.sample_turn = fail_second
        status, _ = await service.post(BODY | {"n": 2})
        assert status == 500
        assert (conversation.num_in_flight, conversation.num_cancelled) == (0, 1)

    run_with_service(use)


def test_closing_an_episode_ends_its_requests() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        task = asyncio.create_task(service.post(BODY))
        await wait_until(lambda: service.conversation.num_in_flight == 1)
        assert service.endpoint.close_episode(service.key) is None
        status, reply = await task
        assert (status, reply["error"]["code"]) == (410, "episode_over")
        assert service.conversation.num_cancelled == 1
        assert (await service.post(BODY))[0] == 410
        assert (await service.post(BODY, key="sk-other"))[0] == 401

    run_with_service(use)


def test_stopping_ends_requests_and_frees_the_port() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        task = asyncio.create_task(service.post(BODY))
        await wait_until(lambda: service.conversation.num_in_flight == 1)
        await service.endpoint.stop()
        assert service.conversation.num_in_flight == 0
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(OSError, match=str(service.port)):
            await asyncio.open_connection("127.0.0.1", service.port)
        await service.endpoint.start()

    run_with_service(use)


def test_requests_of_a_key_are_bounded() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        tasks = [asyncio.create_task(service.post(BODY | {"seed": seed})) for seed in range(64)]
        await wait_until(lambda: service.conversation.num_in_flight == 64)
        status, reply = await service.post(BODY)
        assert status == 429
        assert "64 requests" in reply["error"]["message"]
        service.conversation.gate.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
        assert len(service.endpoint._episodes[service.key].answers) <= 64
        await service.check_next_request()

    run_with_service(use)


def test_requests_that_break_off_free_their_turns_and_are_counted_once() -> None:
    async def use(service: Service) -> None:
        conversation, rng = service.conversation, random.Random(0)
        keys = [service.endpoint.open_episode(conversation) for _ in range(20)]
        conversation.gate.clear()
        tasks = [
            asyncio.create_task(service.post(BODY | {"seed": seed}, key=keys[seed % len(keys)])) for seed in range(400)
        ]
        await wait_until(lambda: conversation.num_in_flight >= 50)
        broken_off = rng.sample(tasks, 20)
        for task in broken_off:
            task.cancel()
        conversation.gate.set()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until(lambda: all(not one.num_requests for one in service.endpoint._episodes.values()))
        delivered = [reply for reply in replies if not isinstance(reply, BaseException)]
        assert len(delivered) == 380
        assert len({reply["id"] for _, reply in delivered}) == 380
        assert conversation.num_in_flight == 0
        assert 380 <= len(conversation.requests) <= 400
        for key in keys:
            service.endpoint.close_episode(key)
        await service.check_next_request()

    run_with_service(use)


def test_many_requests_keep_few_replies() -> None:
    async def use(service: Service) -> None:
        for seed in range(100):
            await service.post(BODY | {"seed": seed})
        assert len(service.endpoint._episodes[service.key].answers) == 64

    run_with_service(use)
