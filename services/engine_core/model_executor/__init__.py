"""Model execution: the only importer of torch and transformers in the engine core."""
