"""Measures the overhead of the endpoint for agents, with turns that are sampled at once.

    python benchmarks/endpoint.py [--requests 10000] [--clients 32] [--messages 4]

The clients run in a process of their own, and write HTTP to sockets without a library. Prints the latency of a request
by one client, the requests per second by several clients at a time, and the endpoint's own account of its overhead.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

from benchmarks.common import describe_machine, make_parser
from envs.group import Turn
from torchgrpo.rollout.conversation import SampledTurn
from torchgrpo.rollout.endpoint.server import Endpoint

TOKENS = list(range(32))
MESSAGE = {"role": "assistant", "content": "The answer is 42. " * 5}
RECORD = Turn(MESSAGE, 0, len(TOKENS))
TURN = SampledTurn(MESSAGE, (), "stop", TOKENS, [-0.5] * len(TOKENS), tuple(range(100)), False, RECORD)


class ImmediateConversation:
    """Conversation whose turns take no time."""

    async def sample_turn(
        self, messages: Any, tools: Any = (), *, max_tokens: Any = None, stop: Any = ()
    ) -> SampledTurn:
        return TURN


async def send_requests(port: int, key: str, name: str, count: int, num_messages: int) -> list[float]:
    """Sends requests one after the other over one connection; returns the seconds of each.

    name: differs between clients, so that no two requests are the same.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "How much is 6 times 7? " * 8} for _ in range(num_messages)]
    seconds = []
    for number in range(count):
        body = orjson.dumps({"model": "policy", "messages": messages, "user": f"{name}-{number}"})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        start = time.perf_counter()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        reply = await reader.readuntil(b"\r\n\r\n")
        if not reply.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the endpoint answered {reply!r}")
        length = next(line for line in reply.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        seconds.append(time.perf_counter() - start)
    writer.close()
    return seconds


async def run_clients(options: argparse.Namespace) -> None:
    """Sends the requests of the client process, and prints their times."""
    port, key, messages = options.port, options.key, options.messages
    await send_requests(port, key, "warmup", 200, messages)
    latencies = await send_requests(port, key, "single", min(2000, options.requests), messages)
    print(f"one client: {statistics.median(latencies) * 1e3:.3f} ms a request (median)", flush=True)
    start = time.perf_counter()
    share = options.requests // options.clients
    await asyncio.gather(*(send_requests(port, key, str(client), share, messages) for client in range(options.clients)))
    rate = share * options.clients / (time.perf_counter() - start)
    print(f"{options.clients} clients: {rate:.0f} requests a second", flush=True)


async def run_endpoint(options: argparse.Namespace) -> None:
    """Serves the clients of another process."""
    endpoint = Endpoint(lambda ids: [str(one) for one in ids])
    await endpoint.start()
    key = endpoint.open_episode(ImmediateConversation())
    arguments = [*sys.argv, "--port", endpoint.url.split(":")[2].partition("/")[0], "--key", key]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    if await process.wait():
        raise RuntimeError("the clients failed")
    print(f"overhead by the endpoint's metrics: {endpoint.metrics()['endpoint/overhead_s'] * 1e3:.3f} ms a request")
    await endpoint.stop()


def main() -> None:
    parser = make_parser(__doc__, requests=10_000, clients=32, messages=4, port=0)
    parser.add_argument("--key", default="", help="of the endpoint at --port, for the process of the clients")
    options = parser.parse_args()
    if options.port:
        asyncio.run(run_clients(options))
    else:
        print(describe_machine())
        asyncio.run(run_endpoint(options))


if __name__ == "__main__":
    main()
