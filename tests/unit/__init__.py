"""Tests that need no cluster, no engine and no network."""
