"""The fake engine process whose prefixes collide and whose output has gaps: `python -m fakes.unwell_engine_process`."""

from __future__ import annotations

import sys

from engine_core.kv_cache import block_hash
from engine_core.session import Session
from fakes import fake_engine_process

GAP_EVERY = 20


class SkippingSession(Session):
    """Counts one batch too many now and then, as if it had got lost."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "batch_seq" and isinstance(value, int) and value % GAP_EVERY == GAP_EVERY - 1:
            value += 1
        super().__setattr__(name, value)


if __name__ == "__main__":
    block_hash._hash_block = lambda parent, token_ids, extra: bytes(32)
    Session.__setattr__ = SkippingSession.__setattr__  # type: ignore[method-assign]
    sys.exit(fake_engine_process.main())
