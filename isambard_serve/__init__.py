"""Serve large models with vLLM on Slurm, measure them, and bring back numbers that can be believed."""

__version__ = "0.1.0"
