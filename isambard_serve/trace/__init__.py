"""Where a decode step's time goes: the torch profiler's traces, read and told by buckets.

``read`` turns a trace into arrays, ``steps`` finds the steps in them, ``buckets`` says which kernel belongs where,
``breakdown`` puts the three together, ``shown`` makes text and picture of the result.
"""
