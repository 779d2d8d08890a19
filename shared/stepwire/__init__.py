"""The small runtime both services share. Never imports torch, frontend or engine_core."""

__version__ = "0.1.0"
