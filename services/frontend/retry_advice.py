"""What a caller is told to wait before it tries again, when nobody can say it better. A constant, no state."""

from __future__ import annotations

RETRY_AFTER_MS = 1000
