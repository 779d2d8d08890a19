"""Pure scheduling: standard library only, no clock, no threads, no I/O. Same calls, same result."""
