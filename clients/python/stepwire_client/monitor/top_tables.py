"""The tables of `stepwire top`: one row a process, from what has changed since the last look. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from stepwire_client.monitor.faults import FAULT_CODES, FAULT_STATUSES, HTTP, RPCS
from stepwire_client.monitor.samples import Change

_E, _F = "stepwire_engine_core_", "stepwire_frontend_"
_ENGINE_MARK, _FRONTEND_MARK = f"{_E}requests_running", f"{_F}engine_up"
_NOTHING = Text("-", style="dim")
_BARS = "▁▂▃▄▅▆▇█"

HIGH_USAGE = 0.95
LONG_WAIT_S = 30.0


def is_engine(change: Change) -> bool:
    """Else it is a frontend, or no stepwire process."""
    return change.now.has(_ENGINE_MARK)


def is_frontend(change: Change) -> bool:
    """Whether the process is a frontend."""
    return change.now.has(_FRONTEND_MARK) or change.now.has(f"{_F}build_info")


def generation_rate(changes: Iterable[Change]) -> float:
    """Tokens a second of all engines."""
    return sum(change.rate(f"{_E}generation_tokens_total") or 0.0 for change in changes if is_engine(change))


def render(changes: dict[str, Change], failures: dict[str, str], history: Sequence[float]) -> RenderableType:
    """Everything: engines, frontends, what does not answer (endpoint -> why), and how tokens a second went."""
    engines = {name: change for name, change in changes.items() if is_engine(change)}
    frontends = {name: change for name, change in changes.items() if is_frontend(change)}
    others = dict.fromkeys(changes.keys() - engines.keys() - frontends.keys(), "serves no stepwire metrics")
    parts: list[RenderableType] = []
    if engines:
        parts.append(_engines(engines))
    if frontends:
        parts.append(_frontends(frontends))
    if history:
        parts.append(Text(f"generated tok/s  {spark(history)}  {history[-1]:,.0f}", style="cyan"))
    parts.extend(Text(f"{name}: {why}", style="bold red") for name, why in sorted({**others, **failures}.items()))
    return Group(*parts)


def spark(values: Sequence[float]) -> str:
    """Values as bars of eight heights; the largest is full."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / largest * len(_BARS)))] for value in values)


def _engines(engines: dict[str, Change]) -> Table:
    models = {change.now.label(_ENGINE_MARK, "model_name") for change in engines.values()}
    table = _table(
        f"engines of {', '.join(sorted(models))}",
        *("engine", "state", "run-\nning", "wait-\ning", "oldest\nwaits", "KV\nused", "prefix\nhits"),
        *("prompt\ntok/s", "gen\ntok/s", "pre-\nempt/s", "step\np99"),
    )
    for change in engines.values():
        now = change.now
        usage, oldest = now.value(f"{_E}kv_cache_usage_ratio"), now.value(f"{_E}oldest_waiting_seconds")
        table.add_row(
            now.label(_ENGINE_MARK, "engine_id"),
            _state(now.label(f"{_E}state", "state")),
            f"{now.value(f'{_E}requests_running'):.0f}",
            f"{now.value(f'{_E}requests_waiting'):.0f}",
            Text(_seconds(oldest), style="yellow" if oldest > LONG_WAIT_S else ""),
            Text(f"{usage:.0%}", style="yellow" if usage > HIGH_USAGE else ""),
            _or_nothing(
                change.ratio(f"{_E}prefix_cache_hit_tokens_total", f"{_E}prefix_cache_query_tokens_total"), "{:.0%}"
            ),
            _or_nothing(change.rate(f"{_E}prompt_tokens_total"), "{:,.0f}"),
            _or_nothing(change.rate(f"{_E}generation_tokens_total"), "{:,.0f}"),
            _or_nothing(change.rate(f"{_E}preemptions_total"), "{:.1f}"),
            _time(change.quantile(0.99, f"{_E}step_duration_seconds")),
        )
    return table


def _frontends(frontends: dict[str, Change]) -> Table:
    table = _table(
        "frontends",
        *("frontend", "en-\ngines", "in\nflight", "calls\n/s", "errors\n/s", "refus-\nals/s"),
        *("TTFT\np50", "TTFT\np99", "ITL\np50", "ITL\np99", "all\np99"),
    )
    for name, change in frontends.items():
        now = change.now
        ups = now.samples.get(f"{_F}engine_up", [])
        num_up = sum(value for _, value in ups)
        latency = [
            _time(change.quantile(q, f"{_F}{metric}"))
            for metric in ("time_to_first_token_seconds", "inter_token_latency_seconds")
            for q in (0.5, 0.99)
        ]
        table.add_row(
            name,
            Text(f"{num_up:.0f}/{len(ups)}", style="bold red" if num_up < max(1, len(ups)) else ""),
            f"{now.value(f'{_F}requests_in_flight'):.0f}",
            _or_nothing(_together([change.rate(RPCS), change.rate(HTTP)]), "{:.1f}"),
            _or_nothing(_fault_rate(change), "{:.1f}"),
            _or_nothing(change.rate(f"{_F}requests_rejected_total"), "{:.1f}"),
            *latency,
            _time(change.quantile(0.99, f"{_F}request_duration_seconds")),
        )
    return table


def _fault_rate(change: Change) -> float | None:
    rpcs = [change.rate(RPCS, grpc_code=code) for code in FAULT_CODES]
    return _together([*rpcs, *(change.rate(HTTP, status=status) for status in FAULT_STATUSES)])


def _together(rates: Sequence[float | None]) -> float | None:
    """None before the second look."""
    return None if None in rates else sum(rate or 0.0 for rate in rates)


def _table(title: str, *columns: str) -> Table:
    """Narrow enough for a terminal of 80 columns; names are folded before figures are."""
    name, *figures = (Text(column) for column in columns)
    return Table(
        Column(name, overflow="fold"),
        *(Column(figure, justify="right", no_wrap=True) for figure in figures),
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )


def _state(state: str) -> Text:
    style = "green" if state == "running" else "bold red" if state in {"dead", "stalled"} else "yellow"
    return Text(state, style=style)


def _or_nothing(value: float | None, form: str) -> Text:
    return _NOTHING if value is None else Text(form.format(value))


def _time(value: float | None) -> Text:
    return _NOTHING if value is None else Text(_seconds(value))


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g}ms" if 0 < value < 1 else f"{value:.3g}s"
