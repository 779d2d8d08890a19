"""Prometheus metrics of the frontend, by theme."""

from frontend.metrics.frontend_metrics import ROWS, UNKNOWN_METHOD, FrontendMetrics
from frontend.metrics.mirror import ROWS as MIRROR_ROWS
from frontend.metrics.requests import ModelMetrics

__all__ = ["MIRROR_ROWS", "ROWS", "UNKNOWN_METHOD", "FrontendMetrics", "ModelMetrics"]
