"""What an alert compares, as questions for Prometheus: a silent alert says nothing, its sides say something."""

from __future__ import annotations

from collections.abc import Iterator

from promql_parser import BinaryExpr, Call, Expr, NumberLiteral, ParenExpr, parse

_COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
# Between what fires and what keeps it from firing.
_SETS = {"and", "or", "unless"}


def sides_of(expr: str) -> list[str]:
    """Both sides of every comparison outside of functions and aggregations, without plain numbers."""
    return [side.prettify() for side in _sides(parse(expr))]


def _sides(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, ParenExpr):
        yield from _sides(expr.expr)
    elif isinstance(expr, BinaryExpr) and str(expr.op) in _COMPARISONS | _SETS:
        yield from _sides(expr.lhs)
        yield from _sides(expr.rhs)
    elif isinstance(expr, Call) and expr.func.name == "absent":
        # Of what is there it gives nothing.
        for argument in expr.args:
            yield from _sides(argument)
    elif not isinstance(expr, NumberLiteral):
        yield expr
