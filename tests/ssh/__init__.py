"""SSH against real servers: a laptop, a jump host, a login node and a compute node in network namespaces."""
