"""docs/errors.md has every reason of the error table with the status, the HTTP status and the advice of the code."""

from __future__ import annotations

import re
from pathlib import Path

from frontend.api.openai_http.errors import status_of
from stepwire.errors import StepwireError
from stepwire.grpc_errors import REASONS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "errors.md").read_text(encoding="utf-8")


def test_the_table_is_the_one_of_the_code():
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\w+) \| (\d+) \| (yes|no) \| \S.* \|$", PAGE)
    expected = [
        (reason, code.name, str(status_of(StepwireError("", reason=reason))), "yes" if is_retryable else "no")
        for reason, (code, is_retryable) in REASONS.items()
    ]
    assert rows == expected
