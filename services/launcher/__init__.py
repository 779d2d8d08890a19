"""Starts an engine core and a frontend on this host, shows a sample answer, and stops both in order."""
