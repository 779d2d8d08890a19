"""Public requests to engine requests: checks, defaults, tokenization, seed. The engine then applies no defaults.

Runs on the event loop, except encoding, which runs in a thread (offline: all in the caller's
thread). Never changes the caller's message, never logs prompts.
"""

from __future__ import annotations

from frontend.input_processor.model_facts import ModelFacts
from frontend.input_processor.processed_request import OutputSettings, ProcessedRequest
from frontend.input_processor.processor import InputProcessor

__all__ = ["InputProcessor", "ModelFacts", "OutputSettings", "ProcessedRequest"]
