"""The metric tables of both services as text: one block a metric for the golden file, tables for docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

import engine_core.metrics
import frontend.metrics
from stepwire.metric_aliases import alias_labels
from stepwire.metric_rows import MetricRow

TABLES: dict[str, Sequence[MetricRow]] = {
    "engine core": engine_core.metrics.ROWS,
    "frontend": frontend.metrics.ROWS,
    "mirror": frontend.metrics.MIRROR_ROWS,
}


def golden_text() -> str:
    """Names, types, labels, buckets and aliases of everything that is served."""
    return "".join(f"== {name}\n{''.join(map(_block, rows))}\n" for name, rows in TABLES.items())


def with_tables(page: str) -> str:
    """The page with what stands between its markers made anew."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- {name}: from the code -->\n", "<!-- end -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        table = _table(rows)
        page, num_found = pattern.subn(lambda match, table=table: match[1] + table + match[2], page)
        assert num_found == 1, f"{begin.strip()} must be there once"
    return page


def _block(row: MetricRow) -> str:
    lines = [f"{row.name} {row.kind.value} {{{','.join(row.labels)}}}"]
    if row.alias:
        lines.append(f"  alias {row.alias} {{{','.join(alias_labels(row))}}}")
    if row.alias_skips:
        lines.append(f"  alias without {','.join(sorted(row.alias_skips))}")
    if row.buckets:
        lines.append(f"  buckets {' '.join(f'{bound:g}' for bound in row.buckets)}")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[MetricRow]) -> str:
    has_alias = any(row.alias for row in rows)
    head = ["Name", "Type", "Labels", *(["Alias"] if has_alias else []), "Meaning"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        alias = [f"`{row.alias}`" if row.alias else ""] if has_alias else []
        lines.append([f"`{row.name}`", row.kind.value, ", ".join(row.labels), *alias, row.help])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
