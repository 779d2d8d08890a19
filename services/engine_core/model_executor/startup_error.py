"""Errors of the time before the engine runs. Used by the thread that starts the engine; holds no logic.

The message is one sentence for the operator and names the flag to change; the caller prints it without a traceback.
"""

from __future__ import annotations


class StartupError(Exception):
    """The model side can not start, and a person has to change something."""
