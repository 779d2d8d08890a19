"""The frontend: validates, tokenizes, detokenizes, streams. Asyncio, no torch, no GPU."""
