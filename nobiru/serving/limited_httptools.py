"""uvicorn's httptools connection, with a limit on the size of request heads and JSON for what cannot be parsed.

Imported only where httptools is installed; h11, the other parser, has a limit of its own.
"""

from __future__ import annotations

from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from nobiru.serving.responses import unreadable_request

MAX_HEAD_BYTES = 64 * 1024


class LimitedHttpToolsProtocol(HttpToolsProtocol):
    """One connection. Counting happens only while a head is incomplete, which is almost never."""

    _reading_head = False
    _num_head_bytes = 0

    def on_message_begin(self) -> None:
        self._reading_head = True
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._reading_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"the head of the request exceeds {MAX_HEAD_BYTES} bytes",
                )

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up."""
        self._refuse(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self.transport.is_closing():
            return
        body = unreadable_request(message)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
