"""Attention over the paged KV cache, and its registration with transformers."""
