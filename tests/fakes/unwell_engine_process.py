"""The fake engine process whose prefixes collide and whose output has gaps: `python -m fakes.unwell_engine_process`."""

from __future__ import annotations

import sys

from engine_core.kv_cache import block_hash
from engine_core.session import Session
from fakes import fake_engine_process

GAP_EVERY = 20


def skip_numbers(session: Session, name: str, value: object) -> None:
    """Count one batch too many now and then, as if it had got lost."""
    if name == "batch_seq" and isinstance(value, int) and value % GAP_EVERY == GAP_EVERY - 1:
        value += 1
    object.__setattr__(session, name, value)


if __name__ == "__main__":
    block_hash._hash_block = lambda parent, token_ids, extra: bytes(32)
    Session.__setattr__ = skip_numbers  # type: ignore[method-assign,assignment]
    sys.exit(fake_engine_process.main())
