"""The rules about the load: was it the one that was asked for, all of it, long enough, and sent by a client with
time to spare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from isambard_serve.evidence import Measured, Verdict, verdict
from isambard_serve.records import Sample

OSL_TOLERANCE = 0.005
"""How far the tokens that came out may be from requests × OSL."""

PREFIX_HITS = 0.01
"""The share of prompt tokens that the prefix cache may answer: random prompts share nothing."""

RECOMPUTED = 0.02
"""The share of tokens that preempted requests may have computed twice."""

WINDOW_S = 60.0
"""How long a point must be measured for its figures to be steady ones."""

WAVES = 2
"""How often each of the concurrent requests must have been replaced: one wave is mostly ramp."""

LITTLE = 0.1
"""How far client and engine may differ in the request-seconds that they count."""

LITTLE_SAMPLES = 20
"""So many samples give the engine's request-seconds to a few percent, whatever the load's shape between them."""

CLIENT_CPU = 0.8
"""The share of a core at which the client, one thread, no longer has time to spare."""

CLIENT_LAG = 0.01
"""The share of a request's median time (E2EL) by which the client may be late in seeing a token: so much later it sends
the next request, and so much longer TPOT reads. It is no share of the ITL: where all sequences decode in one step their
tokens come at once, and a client that is busy with them for a tenth of the step is late by that tenth.
"""


CLIENT_LAG_SEEN_MS = 2.0
"""Up to here an idle event loop is late too: its timers count in whole milliseconds (epoll_wait)."""


def increase(window: Sequence[Sample], counter: str) -> float | None:
    """How far ``counter`` went up in ``window``; None if it was not read at both ends, or fell: then it counts anew."""
    counts = [getattr(sample, counter) for sample in window]
    known = [count for count in counts if count is not None]
    if len(counts) < 2 or None in (counts[0], counts[-1]) or known != sorted(known):
        return None
    return float(known[-1] - known[0])


def ended(measured: Measured) -> Verdict:
    """``bench_ended``: the benchmark ended by itself, with exit code 0, and left its result."""
    how = "had to be ended" if measured.returncode is None else f"ended with {measured.returncode}"
    left = measured.number("output_throughput") is not None
    return verdict(measured.returncode == 0 and left, f"it {how}" + ("" if left else " and left no result"))


def completed(measured: Measured) -> Verdict:
    """``completed``: every request was answered. (The benchmark exits 0 also when every one of them failed.)"""
    return _count(measured, "completed", measured.point.prompts, "requests were answered")


def none_failed(measured: Measured) -> Verdict:
    """``none_failed``: no request failed."""
    return _count(measured, "failed", 0, "requests failed")


def tokens_out(measured: Measured) -> Verdict:
    """``tokens_out``: as many tokens came out as requests × OSL, within 0.5 %; the throughput is theirs."""
    wanted = measured.point.prompts * measured.osl
    tokens, duration_s, tok_s = map(measured.number, ("total_output_tokens", "duration", "output_throughput"))
    if None not in (tokens, duration_s, tok_s) and not math.isclose(
            (tok_s or 0) * (duration_s or 0), tokens or 0, rel_tol=OSL_TOLERANCE):
        return verdict(False, f"{tokens:.0f} tokens in {duration_s:.1f} s are not the {tok_s:.1f} tok/s that it tells")
    return _count(measured, "total_output_tokens", wanted, "tokens came out", OSL_TOLERANCE * wanted)


def _count(measured: Measured, key: str, wanted: float, what: str, tolerance: float = 0) -> Verdict:
    number = measured.number(key)
    if number is None:
        return verdict(None, f"the benchmark's result has no {key}")
    return verdict(abs(number - wanted) <= tolerance, f"{number:.0f} {what}, {wanted:.0f} should have")


def in_flight(measured: Measured) -> Verdict:
    """``in_flight``: as many requests were under way at once as the point's concurrency.

    Counted from when the benchmark sent each request (``queue_times``) and how long it took (``latencies``); its
    own ``max_concurrent_requests`` counts per second and is too high for short runs.
    """
    sent, took = measured.numbers("queue_times"), measured.numbers("latencies")
    if not sent or len(sent) != len(took):
        return verdict(None, "the benchmark's result has no times of each request")
    # A request that ends as another begins makes room for it: ends come first.
    changes = sorted([(begin, 1) for begin in sent] +
                     [(begin + length, -1) for begin, length in zip(sent, took, strict=True)])
    most = max(itertools.accumulate(change for _, change in changes))
    wanted = min(measured.point.concurrency, measured.point.prompts)
    return verdict(most >= wanted, f"{most} requests at most were under way at once, {wanted} should have been")


def window(measured: Measured) -> Verdict:
    """``window``: it was measured for long enough: 60 s, and two waves of requests. A recipe may ask for less
    (``min_window``), and where that alone lets a row pass, this means nothing, and says so.
    """
    duration_s = measured.number("duration")
    if duration_s is None:
        return verdict(None, "the benchmark's result has no duration")
    waves = measured.point.prompts / measured.point.concurrency
    found = (f"{duration_s:.1f} s and {waves:.1f} waves, at least {measured.min_window_s:.0f} s and {WAVES} are asked "
             "for")
    holds = duration_s >= measured.min_window_s and waves >= WAVES
    if holds and duration_s < WINDOW_S:
        return Verdict("not_applicable", f"{found} (bench.min_window; {WINDOW_S:.0f} s unless a recipe lowers it)")
    return verdict(holds, found)


def prefix_hits(measured: Measured) -> Verdict:
    """``prefix_hits``: the prefix cache answered less than 1 % of the prompt tokens."""
    queries = increase(measured.window, "prefix_cache_queries_total")
    hits = increase(measured.window, "prefix_cache_hits_total")
    if not queries or hits is None:
        return verdict(None, "the engine's metrics do not tell")
    return verdict(hits < PREFIX_HITS * queries, f"{hits / queries:.1%} of the prompt tokens came from the cache")


def alone(measured: Measured) -> Verdict:
    """``alone``: the engine worked on nobody else's requests meanwhile: answered none, nor served one that lasts."""
    answered = increase(measured.window, "requests_total")
    generated, own = increase(measured.window, "generation_tokens_total"), measured.number("total_output_tokens")
    if generated is not None and own is not None and generated > own * (1 + OSL_TOLERANCE):
        return verdict(False, f"{generated:.0f} tokens were generated, {own:.0f} of them were the point's own")
    if answered is None:
        return verdict(None, "the engine's metrics do not tell")
    return verdict(answered <= measured.point.prompts,
                   f"{answered:.0f} requests were answered, {measured.point.prompts} of them were the point's own")


def recomputed(measured: Measured) -> Verdict:
    """``recomputed``: preempted requests computed less than 2 % of the tokens again.

    The engine counts preemptions, not tokens. A preempted request repeats its prompt at least, and its prompt and
    output at most; between the two bounds the rule cannot tell.
    """
    preemptions = increase(measured.window, "preemptions_total")
    if preemptions is None:
        return verdict(None, "the engine's metrics do not tell")
    tokens = measured.point.prompts * (measured.isl + measured.osl)
    least, most = preemptions * measured.isl / tokens, preemptions * (measured.isl + measured.osl) / tokens
    why = f"{preemptions:.0f} preemptions: {least:.1%} to {most:.1%} of the tokens were computed again"
    return verdict(True if most < RECOMPUTED else False if least >= RECOMPUTED else None, why)


def littles_law(measured: Measured) -> Verdict:
    """``littles_law``: client and engine count the same request-seconds, within 10 %.

    By Little's law that is the mean number of requests under way × the time. The client adds up how long each of
    its requests took, the engine's samples tell how many it had, running or waiting. If the client counts more, its
    requests lay elsewhere (in a busy client, before a busy API server) and the engine had less to do than was asked;
    if the engine counts more, somebody else was served too. Where engine and client share the CPUs they keep each other
    waiting, and nobody can tell who whom.
    """
    if _virtual(measured):
        return Verdict("not_applicable", "the samples are not by the virtual clock")
    took_s = _request_seconds(measured)
    samples = [(sample.time, sample.running + sample.waiting) for sample in measured.window
               if sample.running is not None and sample.waiting is not None]
    if not took_s or len(samples) < LITTLE_SAMPLES:
        return verdict(None, f"{len(samples)} samples of the engine are too few" if took_s else
                       "the benchmark's result has no times of its requests")
    engine_s = sum((later - earlier) * (before + after) / 2
                   for (earlier, before), (later, after) in itertools.pairwise(samples))
    share = engine_s / took_s
    found = f"the engine counts {share:.0%} of the client's request-seconds"
    if share < 1 - LITTLE and _shares_cpus(measured):
        return verdict(None, f"the engine computes on the same CPUs: {found}")
    return verdict(abs(share - 1) <= LITTLE, found)


def _request_seconds(measured: Measured) -> float:
    """How long all requests took together, as the client saw it; 0 if it does not say. vLLM 0.26 tells their mean."""
    took = measured.numbers("latencies")
    mean_s = (measured.number("mean_e2el_ms") or 0.0) / 1000
    return sum(took) if took else mean_s * (measured.number("completed") or 0.0)


def _shares_cpus(measured: Measured) -> bool:
    """Whether the engine computes on the CPUs that the client and the API servers run on, as its CPU build does."""
    return any(each.device_type == "cpu" for each in measured.evidence.facts)


def _virtual(measured: Measured) -> bool:
    """Whether a simulated engine's clock runs at another pace than the wall's."""
    return (measured.number("time_scale") or 1.0) != 1.0


def client(measured: Measured) -> Verdict:
    """``client``: the load generator took less than 80 % of a core, and its event loop was less late (99th
    percentile) than 1 % of a request's median time. Otherwise it was the client that was measured.

    Where requests are so short that 1 % of their time is within the loop's own resolution, this cannot be told; nor
    where engine and client share the CPUs.
    """
    if _virtual(measured):
        return Verdict("not_applicable", "in virtual time no client sends the requests")
    facts = measured.evidence.client
    request_ms = measured.number("median_e2el_ms")
    if facts is None or facts.cpu_share is None or facts.loop_lag_p99_ms is None or request_ms is None:
        return verdict(None, "the load generator said nothing of itself")
    found = (f"it took {facts.cpu_share:.0%} of a core, and was {facts.loop_lag_p99_ms:.1f} ms late where a request "
             f"takes {request_ms:,.0f} ms")
    if _shares_cpus(measured):
        return verdict(None, f"the engine computes on the same CPUs: {found}")
    late = facts.loop_lag_p99_ms >= CLIENT_LAG * request_ms
    if facts.cpu_share < CLIENT_CPU and late and facts.loop_lag_p99_ms <= CLIENT_LAG_SEEN_MS:
        return verdict(None, f"an idle event loop is as late: {found}")
    return verdict(facts.cpu_share < CLIENT_CPU and not late, found)
