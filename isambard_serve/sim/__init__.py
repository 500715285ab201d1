"""A simulated engine that stands where ``vllm`` stands: ``python -m isambard_serve.sim serve|bench serve …``.

It takes vLLM's flags, answers at vLLM's endpoints with vLLM's metrics, and writes vLLM's log and benchmark JSON, so
that the whole toolkit can be tried and tested without a GPU. Its speed comes from :mod:`isambard_serve.sim.fitted`.
**Its numbers are no measurements**, and everything that it writes says so.

Engine and client share a virtual clock that runs ``--sim-time-scale`` times as fast as the wall's. Nothing else in
the package imports this.
"""
