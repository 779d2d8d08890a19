"""The engine core: scheduler, paged KV cache, model executor and step loop. Owns the GPU, has no tokenizer."""
