"""Structured output: grammars are compiled beside the step loop and forbid tokens within it."""
