"""Why a launch ended early, in one sentence a user can act on."""

from __future__ import annotations


class LaunchError(Exception):
    """The services can not be started, or one of them has ended by itself."""
