"""The OpenAI-compatible HTTP API: JSON to the messages of the public gRPC API, and events of the same path back.

A translation and nothing more: sampling, admission, tokenization and errors are those of gRPC. All of it runs on the
frontend's event loop; what takes long (large bodies, many log-probabilities) is made in a thread.
"""
