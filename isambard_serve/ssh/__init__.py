"""SSH: what ``ssh -G`` says of a host, keys and certificates, and the two ways to run programs over there."""
