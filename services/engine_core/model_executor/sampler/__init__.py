"""From logits to tokens: pure functions of logits, parameters, seed and index."""
