"""The tokenizer files of an engine's model on this machine: the operator's own, or the engine's, kept by their hash.

Owner: the event loop; unpacking runs in a thread. The hash decides, never a name or a date.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from stepwire import tokenizer_archive
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc as pb_grpc
from stepwire.errors import UnavailableError

FETCH_TIMEOUT_S = 60.0


class TokenizerStore:
    """`own_directory` is the operator's --tokenizer; without it the files come from the engines into `cache_dir`."""

    def __init__(self, cache_dir: Path, own_directory: Path | None) -> None:
        self._cache_dir = cache_dir
        self._own_directory = own_directory
        self._own_sha256 = tokenizer_archive.sha256(tokenizer_archive.build(own_directory)) if own_directory else ""

    def expected_sha256(self, engine_sha256: str) -> str:
        """What Hello states: our own hash, or that of the files we hold; empty when the engine has none to compare."""
        return (self._own_sha256 or engine_sha256) if engine_sha256 else ""

    async def ensure(self, stub: pb_grpc.EngineCoreServiceAsyncStub, sha256: str) -> Path:
        """The directory of the files with this hash. Raises UnavailableError when the engine can not deliver them."""
        if self._own_directory:
            return self._own_directory
        if not sha256:
            raise UnavailableError("the engine has no tokenizer files; give the frontend --tokenizer")
        cached = self._cache_dir / sha256
        if cached.is_dir():
            return cached
        data = await self._fetch(stub)
        if tokenizer_archive.sha256(data) != sha256:
            raise UnavailableError("the tokenizer files from the engine do not have the hash it announced")
        try:
            return await asyncio.to_thread(tokenizer_archive.unpack, data, self._cache_dir)
        except (OSError, ValueError) as error:
            raise UnavailableError(f"cannot keep the engine's tokenizer files in {self._cache_dir}: {error}") from error

    async def _fetch(self, stub: pb_grpc.EngineCoreServiceAsyncStub) -> bytes:
        data = bytearray()
        try:
            async for piece in stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S):
                data += piece.data
                if len(data) > tokenizer_archive.MAX_UNPACKED_BYTES:
                    raise UnavailableError("the tokenizer archive of the engine is too large to be one")
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the engine does not deliver its tokenizer files: {error.details()}") from error
        return bytes(data)
