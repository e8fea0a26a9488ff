"""Tests of hostile requests: each gets its status, and the next good request is answered."""

import asyncio
import gzip
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import pytest

from tests.log_capture import LogCapture
from tests.rollout.endpoint.strict_conversation import DEADLINE_S, HELLO, Service, run_with_service, wait_until

CHAT = "/v1/chat/completions"
GOOD = orjson.dumps({"messages": HELLO})
MIB = 2**20


def raw_request(
    service: Service, body: bytes = GOOD, line: str = f"POST {CHAT} HTTP/1.1", key: str | None = None, **headers: object
) -> bytes:
    """Returns a request that closes its connection; headers of None are left out."""
    fields = {
        "Host": "x",
        "Authorization": f"Bearer {service.key if key is None else key}",
        "Content-Length": len(body),
        "Connection": "close",
    }
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [line, *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def statuses(reply: bytes) -> list[int]:
    return [int(part[2:5]) for part in reply.split(b"HTTP/1.")[1:]]


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"messages": HELLO} | fields)


def make_chunks(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


TRICKS: dict[str, tuple[Callable[[Service], bytes], int]] = {
    "no key": (lambda s: raw_request(s, Authorization=None), 401),
    "an empty key": (lambda s: raw_request(s, key=""), 401),
    "a key with a suffix": (lambda s: raw_request(s, key=s.key + "x"), 401),
    "a beginning of a key": (lambda s: raw_request(s, key=s.key[:-1]), 401),
    "a key in the path": (lambda s: raw_request(s, line=f"POST {CHAT}?api_key={s.key} HTTP/1.1", key="x"), 401),
    "another scheme": (lambda s: raw_request(s, Authorization=f"Basic {s.key}"), 401),
    "bytes beyond ASCII as key": (lambda s: raw_request(s, key="\xff\xfe"), 401),
    "path traversal": (lambda s: raw_request(s, line="POST /v1/../../etc/passwd HTTP/1.1"), 404),
    "encoded path traversal": (lambda s: raw_request(s, line="GET /v1/%2e%2e/%2e%2e/etc/passwd HTTP/1.1"), 404),
    "a doubled slash": (lambda s: raw_request(s, line=f"POST /{CHAT} HTTP/1.1"), 404),
    "a null byte in the path": (lambda s: raw_request(s, line=f"POST {CHAT}%00 HTTP/1.1"), 404),
    "another method": (lambda s: raw_request(s, line=f"DELETE {CHAT} HTTP/1.1"), 405),
    "a method override": (
        lambda s: raw_request(s, line=f"GET {CHAT} HTTP/1.1", X_HTTP_Method_Override="POST"),
        405,
    ),
    "an unknown method": (lambda s: raw_request(s, line=f"BREW {CHAT} HTTP/1.1"), 400),
    "a websocket upgrade": (
        lambda s: raw_request(s, b"", f"GET {CHAT} HTTP/1.1", Connection="Upgrade, close", Upgrade="websocket"),
        405,
    ),
    "an absolute URI": (lambda s: raw_request(s, line=f"POST http://example.com{CHAT} HTTP/1.1"), 200),
    "HTTP/1.0": (lambda s: raw_request(s, line=f"POST {CHAT} HTTP/1.0"), 200),
    "a wrong content type": (lambda s: raw_request(s, Content_Type="image/png; charset=utf-99"), 200),
    "a lone name": (lambda s: b"hello\r\n\r\n", 400),
    "TLS": (lambda s: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
    "an HTTP/2 preface": (lambda s: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a header of 16 KiB": (lambda s: raw_request(s, X_Big="x" * 2**14), 400),
    "1,000 headers": (lambda s: raw_request(s, **{f"X{number}": number for number in range(1000)}), 400),
    "a path of 16 KiB": (lambda s: raw_request(s, line=f"POST /{'a' * 2**14} HTTP/1.1"), 400),
    "two lengths": (lambda s: raw_request(s).replace(b"Host: x", b"Host: x\r\nContent-Length: 5"), 400),
    "a negative length": (lambda s: raw_request(s, Content_Length=-1), 400),
    "length and chunks": (lambda s: raw_request(s, make_chunks(GOOD), Transfer_Encoding="chunked"), 400),
    "a bad chunk size": (
        lambda s: raw_request(s, b"zz\r\n", Content_Length=None, Transfer_Encoding="chunked"),
        400,
    ),
    "a body of 2 GB": (lambda s: raw_request(s, b"", Content_Length=2 * 10**9) + b"x" * 1000, 413),
    "2 GB after an Expect": (
        lambda s: raw_request(s, b"", Content_Length=2 * 10**9, Expect="100-continue"),
        413,
    ),
    "a gzip bomb": (lambda s: raw_request(s, gzip.compress(bytes(64 * MIB)), Content_Encoding="gzip"), 415),
    "no body": (lambda s: raw_request(s, b""), 400),
    "a null byte": (lambda s: raw_request(s, b"\0"), 400),
    "invalid UTF-8": (lambda s: raw_request(s, b'{"messages": [{"role": "user", "content": "\xff"}]}'), 400),
    "UTF-16": (lambda s: raw_request(s, GOOD.decode().encode("utf-16")), 400),
    "a list": (lambda s: raw_request(s, b"[]"), 400),
    "a number": (lambda s: raw_request(s, b"1"), 400),
    "NaN": (lambda s: raw_request(s, b'{"temperature": NaN}'), 400),
    "an infinite number": (lambda s: raw_request(s, b'{"temperature": 1e999}'), 400),
    "5,000 digits": (lambda s: raw_request(s, b'{"max_tokens": ' + b"9" * 5000 + b"}"), 400),
    "a key twice": (lambda s: raw_request(s, b'{"messages": [], "messages": []}'), 400),
    "a lone surrogate": (lambda s: raw_request(s, GOOD.replace(b"hello", b"\\ud800")), 400),
    "100,000 open lists": (lambda s: raw_request(s, b"[" * 100_000), 400),
    "1,000 nested objects": (lambda s: raw_request(s, b'{"a":' * 1000 + b"1" + b"}" * 1000), 400),
    "nested arguments": (
        lambda s: raw_request(
            s,
            chat(
                messages=[
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"id": "c", "function": {"name": "f", "arguments": '{"a":' * 5000 + "1" + "}" * 5000}}
                        ],
                    }
                ]
            ),
        ),
        400,
    ),
    "a role with a line feed": (lambda s: raw_request(s, chat(messages=[{"role": "system\n", "content": "a"}])), 400),
    "content of another type": (lambda s: raw_request(s, chat(messages=[{"role": "user", "content": 1}])), 400),
    "a giant n": (lambda s: raw_request(s, chat(n=2**53)), 400),
    "a negative max_tokens": (lambda s: raw_request(s, chat(max_tokens=-1)), 400),
    "1,000,000 stops": (lambda s: raw_request(s, chat(stop=["a"] * 1_000_000)), 400),
    "a tool of 8 MiB": (
        lambda s: raw_request(
            s, chat(tools=[{"type": "function", "function": {"name": "f", "description": "x" * 8 * MIB}}])
        ),
        200,
    ),
    "null bytes in a text": (lambda s: raw_request(s, GOOD.replace(b"hello", b"\\u0000")), 200),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_hostile_request_gets_its_status(trick: str, log_capture: LogCapture) -> None:
    make_request, status = TRICKS[trick]

    async def use(service: Service) -> None:
        reply = await service.send_bytes(make_request(service))
        assert statuses(reply) == [status], reply[:500]
        assert b"Traceback" not in reply
        assert b".py" not in reply
        if status != 200:
            body = orjson.loads(reply.partition(b"\r\n\r\n")[2])
            assert body["error"].keys() == {"message", "type", "code", "param"}
            assert not service.conversation.requests
        await service.check_next_request()

    run_with_service(use)
    assert "Traceback" not in log_capture.text
    assert "failed" not in log_capture.text


def test_no_key_and_a_wrong_key_get_the_same_reply() -> None:
    async def use(service: Service) -> list[bytes]:
        requests = [raw_request(service, Authorization=None), raw_request(service, key="sk-wrong")]
        return [(await service.send_bytes(data)).partition(b"\r\n\r\n")[2] for data in requests]

    first, second = run_with_service(use)
    assert first == second


def test_an_endless_chunked_body_is_refused_while_it_arrives() -> None:
    async def use(service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(raw_request(service, b"", Content_Length=None, Transfer_Encoding="chunked"))
        chunk = b"%x\r\n%b\r\n" % (MIB, bytes(MIB))

        async def send_chunks() -> None:
            while True:
                writer.write(chunk)
                await writer.drain()

        sending = asyncio.create_task(send_chunks())
        reply = await reader.readuntil(b"\r\n\r\n")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        assert statuses(reply) == [413]
        await service.check_next_request()

    run_with_service(use)


def test_half_requests_and_slow_bodies_end_at_the_deadline() -> None:
    async def use(service: Service) -> None:
        assert await service.send_bytes(b"") == b""
        assert await service.send_bytes(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n") == b""
        service.endpoint._deadline_s = DEADLINE_S
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        await wait_until(lambda: len(service.endpoint._server.connections) == 1)
        service.endpoint._deadline_s = 0.3  # of the body; the connection keeps the other one for its headers
        writer.write(raw_request(service, GOOD[:-5], Content_Length=len(GOOD)))
        reply = await reader.read()
        writer.close()
        assert statuses(reply) == [408]
        service.endpoint._deadline_s = DEADLINE_S
        await service.check_next_request()

    run_with_service(use, deadline_s=0.3)


def test_slow_headers_end_at_the_deadline() -> None:
    async def use(service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)

        async def send_slowly() -> None:
            for byte in b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        sending, reply = asyncio.create_task(send_slowly()), b""
        with suppress(ConnectionResetError):  # a byte may arrive while the connection closes
            reply = await reader.read()
        assert reply == b""
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        service.endpoint._deadline_s = DEADLINE_S  # a good request may be slow
        await service.check_next_request()

    run_with_service(use, deadline_s=0.3)


def test_a_client_that_breaks_off_its_body_leaves_nothing() -> None:
    async def use(service: Service) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(raw_request(service, GOOD[:5], Content_Length=len(GOOD)))
        episode = service.endpoint._episodes[service.key]
        await wait_until(lambda: episode.num_requests == 1)
        writer.close()
        await wait_until(lambda: episode.num_requests == 0)
        await service.check_next_request()

    run_with_service(use)


def test_a_client_that_does_not_read_is_closed_at_the_deadline() -> None:
    async def use(service: Service) -> None:
        service.conversation.message = {"role": "assistant", "content": "x" * 16 * MIB}
        service.conversation.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=2)
        writer.write(raw_request(service))
        episode = service.endpoint._episodes[service.key]
        await wait_until(lambda: len(service.conversation.requests) == 1)
        service.endpoint._deadline_s = 0.5  # of the reply only; the request may be slow
        service.conversation.gate.set()
        await wait_until(lambda: episode.num_requests == 0)
        await wait_until(lambda: not service.endpoint._server.connections)
        writer.close()
        service.conversation.message = {"role": "assistant", "content": "y"}
        (answer,) = episode.answers.values()
        assert not answer.is_delivered

    run_with_service(use)


def test_an_expected_body_is_asked_for() -> None:
    async def use(service: Service) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(raw_request(service, b"", Content_Length=len(GOOD), Expect="100-continue"))
        first = await reader.readuntil(b"\r\n\r\n")
        writer.write(GOOD)
        rest = await reader.read()
        writer.close()
        return statuses(first + rest)

    assert run_with_service(use) == [100, 200]


def test_pipelined_requests_are_answered_in_order() -> None:
    async def use(service: Service) -> None:
        good = raw_request(service, Connection="keep-alive")
        models = raw_request(service, b"", "GET /v1/models HTTP/1.1", Connection="keep-alive")
        unknown = raw_request(service, b"", "GET / HTTP/1.1", Connection="keep-alive")
        reply = await service.send_bytes(good + models + unknown + raw_request(service, key="x"))
        assert statuses(reply) == [200, 200, 404, 401]

    run_with_service(use)


def test_a_flood_of_pipelined_requests_waits_for_the_first() -> None:
    async def use(service: Service) -> None:
        service.conversation.gate.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        many = raw_request(service, Connection="keep-alive") * 1000
        for _ in range(10):
            writer.write(many)
        await wait_until(lambda: service.conversation.num_in_flight == 1)
        (connection,) = service.endpoint._server.connections
        await wait_until(lambda: bool(connection._messages))
        assert len(connection._messages) < 200
        writer.close()
        service.conversation.gate.set()
        await service.check_next_request()

    run_with_service(use)


def test_connections_are_bounded() -> None:
    async def use(service: Service) -> None:
        service.endpoint._max_connections = 5
        pairs = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(5)]
        await wait_until(lambda: len(service.endpoint._server.connections) == 5)
        reply = b""
        with suppress(ConnectionResetError):
            reply = await service.send_bytes(raw_request(service))
        assert reply == b""
        assert not service.conversation.requests
        for _, writer in pairs:
            writer.close()
        await wait_until(lambda: not service.endpoint._server.connections)
        await service.check_next_request()

    run_with_service(use)
