"""Tests with real daemons: Slurm and what stands around it."""
