"""Connections of the endpoint, which answer what is no HTTP request with an error object."""

import asyncio

from aiohttp import web

from torchgrpo.rollout.endpoint.replies import error_reply
from torchgrpo.rollout.endpoint.request_body import RequestError

MAX_HEADER_BYTES, MAX_HEADERS = 8190, 64
LINGERING_S = 2.0
"""Seconds in which the rest of a refused body is read and dropped, so that the client reads its status."""


class Connection(web.RequestHandler):
    """Connection of a client.

    deadline_s: seconds without a whole request, after which the connection closes.
    """

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, deadline_s: float) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=deadline_s,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=LINGERING_S,
            auto_decompress=False,
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the error of bytes that are no HTTP request."""
        if isinstance(exc, ConnectionError):  # the client went away while its reply was sent
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("a part of a reply is sent already")
        if status == 500:
            self.log_exception("a request of an agent failed", exc_info=exc)
        text = "the bytes are no HTTP request, or its headers are too large; send fewer and shorter headers"
        text = text if status == 400 else "the request failed; the log of the run has the reason"
        response = error_reply(RequestError(status, text)).response()
        response.force_close()
        return response


class RefusedConnection(asyncio.Protocol):
    """Connection beyond the limit, which closes at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes the connection."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
