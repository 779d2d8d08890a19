"""Comparisons with other engines on this machine: `make bench-peers`. bench/README.md says how to install them."""
