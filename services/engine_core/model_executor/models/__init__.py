"""Model implementations behind one call: a flattened batch in, logits out."""
