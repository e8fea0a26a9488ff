"""MCP server of the tests: `python mcp_test_server.py [KIND]`, over stdio or HTTP."""

import os
import subprocess
import sys
import time

if sys.argv[1:] == ["hangs"]:
    time.sleep(3600)
if sys.argv[1:] == ["fails"]:
    sys.exit("no such index: words.db")

import asyncio

from mcp.server.mcpserver import MCPServer

server = MCPServer("words")
counts: dict[str, int] = {}


@server.tool()
def spell(word: str) -> str:
    """Spells a word backwards."""
    return word[::-1]


@server.tool()
def count_calls() -> int:
    """Counts its own calls in this process."""
    counts["calls"] = counts.get("calls", 0) + 1
    return counts["calls"]


@server.tool()
def table(rows: int) -> list[dict[str, int]]:
    """Returns numbered rows."""
    return [{"row": row} for row in range(rows)]


@server.tool()
def fail(word: str) -> str:
    """Fails."""
    raise ValueError(f"no such word: {word}")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """Ends the server in the middle of the call."""
    print("the disk is full", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def leave_child() -> int:
    """Starts a process that leaves the server's session and ignores the end of its input."""
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"]
    return subprocess.Popen(command, start_new_session=True).pid


@server.tool()
def process_id() -> int:
    """Returns the number of the server's process."""
    return os.getpid()


if sys.argv[1:] == ["http"]:
    server.run("streamable-http", port=int(os.environ["MCP_TEST_PORT"]))
elif sys.argv[1:] == ["stubborn"]:
    server.run("stdio")
    time.sleep(3600)
else:
    print("words are ready")  # a line that is no message
    server.run("stdio")
