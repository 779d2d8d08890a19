"""The tokenizer's files as the messages of a GetTokenizer stream carry them, whatever its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from frontend.serving_model import ServingModel
from stepwire import tokenizer_archive


async def tokenizer_chunks(model: ServingModel) -> Iterator[tuple[bytes, str]]:
    """Parts of the zip archive, the last one with the SHA-256 of the whole and the others without."""
    archive = model.tokenizer_archive
    sha256 = await model.input_processor.in_thread(partial(tokenizer_archive.sha256, archive))
    return _cut(archive, sha256)


def _cut(archive: bytes, sha256: str) -> Iterator[tuple[bytes, str]]:
    size = tokenizer_archive.CHUNK_BYTES
    for start in range(0, len(archive), size):
        yield archive[start : start + size], sha256 if start + size >= len(archive) else ""
