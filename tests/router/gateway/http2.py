"""As much of HTTP/2 as one request needs: no Huffman codes, no dynamic table (RFC 9113, 7541)."""

import asyncio

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def _literal(name: str, value: str) -> bytes:
    texts = (name.encode(), value.encode())
    assert all(len(text) < 127 for text in texts)
    return b"\x00" + b"".join(bytes([len(text)]) + text for text in texts)


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> tuple[bytes, bytes]:
    """The first byte of the answer's headers, which is 0x88 for status 200, and its body."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "door"}
    block = b"".join(_literal(name, value) for name, value in headers.items())
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, body)
    )
    first, answer = b"", b""
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind == _SETTINGS and not flags & _ACK:
            writer.write(_frame(_SETTINGS, _ACK, 0))
        elif stream == 1 and kind == _HEADERS:
            first = first or payload[:1]
        elif stream == 1 and kind == _DATA:
            answer += payload
        elif stream == 1:
            raise ConnectionError(f"a frame of kind {kind}: {payload!r}")
        if stream == 1 and flags & _END_STREAM:
            return first, answer
