"""Rows of a frontend of several workers about these: how many serve, how often one was replaced. Of the supervisor."""

from __future__ import annotations

from stepwire.metric_rows import counter, gauge

LISTENING = gauge("stepwire_frontend_workers", "Worker processes that listen; served with --workers above 1 only.")
RESTARTS = counter(
    "stepwire_frontend_worker_restarts_total",
    "Worker processes started in place of one that has died; served with --workers above 1 only.",
)
ROWS = (LISTENING, RESTARTS)
