"""Pure paged KV cache bookkeeping. Knows ids, counts and hashes; not requests, not tensors."""
