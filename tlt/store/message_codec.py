"""Encode messages as MessagePack beside the schema's version; nothing is pickled."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from tlt.errors import StoreError
from tlt.protocol.refs import SCHEMA_VERSION

_Message = TypeVar("_Message")
Fields = dict[bytes, bytes]


class Codec(Generic[_Message]):
    def __init__(self, kind: "type[_Message] | object") -> None:
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kind)  # pyright: ignore[reportArgumentType, reportCallIssue]
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: _Message) -> Fields:
        return {b"v": b"%d" % SCHEMA_VERSION, b"m": self._encoder.encode(message)}

    def decode(self, fields: Mapping[bytes, bytes]) -> _Message:
        version = fields.get(b"v", b"none")
        if version != b"%d" % SCHEMA_VERSION:
            raise StoreError(
                f"the entry was written by TLT with message schema "
                f"{version.decode(errors='replace')}; this version reads schema {SCHEMA_VERSION}: "
                "finish that session with the version that wrote it"
            )
        try:
            return self._decoder.decode(fields[b"m"])
        # msgspec's own, text that is not UTF-8, or nested too deeply
        except (KeyError, ValueError, RecursionError) as error:
            raise StoreError(f"the entry cannot be read: {error}") from error
