"""What goes into the container beside the load generator: it needs Python's standard library and nothing else."""
