"""Runs inside vLLM's own processes, on whatever Python they have (3.10 or newer), with its standard library alone."""
