"""Scheduling policies: who is served before whom. The names are those of the command line."""

from __future__ import annotations

import enum

from engine_core.scheduler.lazy_heap import Order
from engine_core.scheduler.request import Request


class SchedulingPolicy(enum.Enum):
    """`order` holds for requests that run, and for preempted ones: whoever sorts last is preempted first."""

    # Client classes that wait take turns, and within one whoever arrived first; priorities mean nothing.
    FAIR = "fair"
    # As they were queued; priorities and classes mean nothing.
    FCFS = "fcfs"
    # By priority, then as FAIR: see PriorityOrder for requests that were never scheduled.
    PRIORITY = "priority"

    def order(self, request: Request) -> Order:
        if self is SchedulingPolicy.FCFS:
            return (request.order,)
        return (request.priority, request.arrival_time, request.order)
