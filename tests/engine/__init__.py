"""Tests with the real engine, vLLM, in its CPU build."""
