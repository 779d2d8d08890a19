"""The wall clock, which a correction may bend, is read for dates and never for a duration."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(")
READERS = {
    # Lays the loop's own clock on the date of a scrape.
    "services/engine_core/metrics/steps.py",
    # Numbers of an engine that starts again begin above its old ones.
    "services/engine_core/process.py",
    # Templates and answers tell the date.
    "services/frontend/api/compat/engine_facts_messages.py",
    "services/frontend/api/openai_http/answer.py",
    "services/frontend/api/openai_http/service_routes.py",
    "services/frontend/chat_template.py",
}


def test_only_dates_come_from_the_wall_clock():
    sources = [path for top in ("services", "shared") for path in (ROOT / top).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in sources if WALL_CLOCK.search(path.read_text(encoding="utf-8"))}
    assert readers == READERS
