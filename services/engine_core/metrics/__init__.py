"""Prometheus metrics of the engine core, by theme; rows and values lie side by side."""

from engine_core.metrics.collector import ROWS, make_registry
from engine_core.metrics.engine_view import EngineView

__all__ = ["ROWS", "EngineView", "make_registry"]
