"""Fakes for unit tests; each passes the contract suite of what it stands for."""
