"""Conversations: from typed messages to a prompt, and from generated text to content, reasoning and tool calls."""
