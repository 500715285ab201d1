"""Tests of the whole way on one machine without Slurm, with the simulated engine."""
