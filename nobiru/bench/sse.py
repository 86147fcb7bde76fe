"""Server-sent events from the bytes of an answer, however they were cut on the way."""

from __future__ import annotations

from collections.abc import Iterator


class EventDecoder:
    """Collects bytes and gives the `data` of each event that is complete.

    Follows the WHATWG's event stream format: lines end with LF, CRLF or CR, a blank line ends an event, several `data`
    lines are joined by LF, comments and other fields are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The events that `chunk` completes."""
        buffer = self._rest + chunk
        held = b""
        if buffer.endswith(b"\r"):  # half of a CRLF, perhaps
            buffer, held = buffer[:-1], b"\r"
        *lines, rest = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        for line in lines:
            if line:
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
            elif self._data:
                event, self._data = b"\n".join(self._data), []
                yield event.decode("utf-8", errors="replace")
