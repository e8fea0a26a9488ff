"""Reads the address of an MCP server in `env.tools`."""

import shlex
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from config.schema.errors import ConfigError

MCP_PREFIX = "mcp:"
SHARED_PREFIX = "shared:"


@dataclass(frozen=True)
class McpAddress:
    """Address of an MCP server: a command, or a URL.

    Args:
        place: config key and value, for messages.
        command: words of the command; empty for a URL.
        url: empty for a command.
        is_shared: whether all episodes use one connection.
    """

    place: str
    command: tuple[str, ...]
    url: str
    is_shared: bool


def read_mcp_address(path: str) -> McpAddress:
    """Reads `mcp:COMMAND ARGS`, `mcp:http://HOST:PORT/mcp`, or either one after `mcp:shared:`.

    Raises:
        ConfigError: the package is missing, the command does not exist, or the URL has no host.
    """
    place = f"env.tools={path}"
    if find_spec("mcp") is None:
        raise ConfigError(f"{place} needs the MCP package: pip install -e '.[mcp]' in the project's folder")
    rest = path.removeprefix(MCP_PREFIX)
    is_shared = rest.startswith(SHARED_PREFIX)
    target = rest.removeprefix(SHARED_PREFIX).strip()
    if target.startswith(("http://", "https://")):
        try:
            host = urlsplit(target).hostname
        except ValueError:
            host = None
        if not host:
            raise ConfigError(f"{place}: the address has no host; write mcp:http://HOST:PORT/mcp")
        return McpAddress(place, (), target, is_shared)
    try:
        command = tuple(shlex.split(target))
    except ValueError as error:
        raise ConfigError(f"{place}: the command cannot be read: {error}; check its quotes") from error
    if not command:
        raise ConfigError(f"{place}: there is no command; write mcp:COMMAND ARGS, or mcp:http://HOST:PORT/mcp")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{place}: the command {command[0]!r} does not exist; install it, or give its full path")
    return McpAddress(place, command, "", is_shared)
