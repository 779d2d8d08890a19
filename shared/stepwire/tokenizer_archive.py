"""The tokenizer files of a model as one deterministic zip: same files, same bytes, same SHA-256.

The engine ships the archive and never reads what is in it; a frontend unpacks it into its cache by hash. The hash in
Hello and Ready is what keeps the two from disagreeing.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

# Everything that decides text <-> ids, the chat format, and the model's generation defaults.
FILE_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
CHUNK_BYTES = 64 * 1024
# A zip bomb must not fill the disk of a frontend.
MAX_UNPACKED_BYTES = 256 * 1024 * 1024


def build(directory: Path) -> bytes:
    """Zip the tokenizer files of a model directory; empty when it has none."""
    present = [name for name in FILE_NAMES if (directory / name).is_file()]
    if not present:
        return b""
    buffer = io.BytesIO()
    # Stored, not deflated: zlib builds differ in their output, and the hash must not.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in present:
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), (directory / name).read_bytes())
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    """Lower-case hex digest, or empty for an empty archive."""
    return hashlib.sha256(data).hexdigest() if data else ""


def unpack(data: bytes, cache_dir: Path) -> Path:
    """Unpack into `cache_dir/<sha256>` once and return it. Raises ValueError for names or sizes that do not belong."""
    target = cache_dir / sha256(data)
    if target.is_dir():
        return target
    staging = cache_dir / f".{target.name}.{os.getpid()}"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        unknown = [entry.filename for entry in entries if entry.filename not in FILE_NAMES]
        if unknown or sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
            raise ValueError(
                f"not a tokenizer archive: unexpected files {unknown} or more than {MAX_UNPACKED_BYTES} bytes"
            )
        staging.mkdir(parents=True, exist_ok=True)
        archive.extractall(staging)
    try:
        staging.rename(target)
    except OSError:
        # Another frontend on this host was faster; its copy has the same hash, so it is the same.
        if not target.is_dir():
            raise
    return target
