"""The benchmarks of docs/performance.md. Run from the repository's root: `make bench`, or `python -m bench.NAME`."""
