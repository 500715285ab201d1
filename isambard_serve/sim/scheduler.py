"""The simulated engine's core: continuous batching over DP ranks in virtual time. No threads, no I/O, no chance.

It schedules as vLLM's V1 scheduler does: decoding sequences first, one token each; then chunks of prompts within
``max_num_batched_tokens``; a new sequence only if the blocks of its whole prompt are free; and when a decoding
sequence needs a block and none is free, the newest sequence gives all of its own back and is computed again later.
All ranks step together, as they do with expert parallelism.

A step costs O(ranks), however many sequences decode in it. They all grow by one token per step, so each needs its
next block whenever the step's number has one certain remainder modulo the block size, and ends at a step that is
known when it starts to decode: a count per remainder and a bucket per step are all that is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from isambard_serve.sim.counters import RankStatistics
from isambard_serve.sim.prefix import PrefixCache


@dataclass(frozen=True)
class Limits:
    """What the engine may hold. All but ``ranks`` are per DP rank.

    Attributes:
        kv_blocks: blocks of KV cache.
        block_size: tokens of a block.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        prefix_caching: whether prompts that come again are found.
        warm_prefix: share of each prompt that is found in the cache although it was never seen (a planted fault).
        preempt_every: steps after which the newest sequence is preempted without need (a planted fault); 0: never.
    """

    ranks: int
    kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True
    warm_prefix: float = 0.0
    preempt_every: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One request. Times are virtual seconds.

    Attributes:
        prompt_tokens: length of the prompt.
        output_tokens: tokens that will be generated.
        key: the same for requests with the same prompt.
        on_end: called when the request has ended, for whatever reason.
        reason: why it ended (``length``, ``stop`` or ``abort``), None before.
    """

    prompt_tokens: int
    output_tokens: int
    key: Hashable
    on_end: Callable[[Request], None] | None = None
    end_reason: str = "length"
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float | None = None
    reason: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    gaps_s: list[float] = field(default_factory=list)   # from a token to the next, where a preemption lay between
    # The scheduler's own.
    rank: int = -1
    generated: int = 0          # tokens when it last started or stopped decoding
    to_prefill: int = 0         # tokens of prompt (and recomputation) still to compute
    joined: int = -1            # the step in which it started to decode; -1 while it does not
    last_step: int = -1         # the step that gives its last token

    @property
    def context(self) -> int:
        """Tokens of prompt and output, as of the last start or stop of decoding."""
        return self.prompt_tokens + self.generated


@dataclass
class Batch:
    """What one rank does in one step."""

    decoding: int = 0
    prefill_tokens: int = 0
    prefilled: list[Request] = field(default_factory=list)


class Rank:
    """One DP rank: its queue, its running sequences and its KV cache."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}      # in the order of admission
        self._prefilling: deque[Request] = deque()
        self.used_blocks = 0
        self.decoding = 0
        self.context = 0                            # tokens in the KV cache of the decoding sequences
        self._growing = [0] * limits.block_size     # step % block_size → sequences that then need a block
        self._ending: dict[int, list[Request]] = {}
        self.prefixes = PrefixCache(limits.kv_blocks * limits.block_size, limits.block_size)
        self.statistics = RankStatistics()

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self.used_blocks / self._limits.kv_blocks

    def schedule(self, step: int, now: float) -> Batch:
        """Decides what is computed in ``step``, which begins at ``now``, and takes the blocks for it."""
        limits = self._limits
        preempted = False
        if limits.preempt_every and step % limits.preempt_every == 0 and self.running:
            newest = next(reversed(self.running))
            if newest.joined >= 0:
                self._preempt(newest, step, now)
                preempted = True
        while self._growing[step % limits.block_size] > limits.kv_blocks - self.used_blocks:
            self._preempt(next(reversed(self.running)), step, now)
            preempted = True
        self.used_blocks += self._growing[step % limits.block_size]
        self.context += self.decoding
        batch = Batch(decoding=self.decoding)
        budget = limits.max_num_batched_tokens - batch.decoding
        closed = preempted and self.running         # nobody comes in while others have to leave
        while budget > 0 and (self._prefilling or (not closed and self._admit(now))):
            request = self._prefilling[0]
            chunk = min(budget, request.to_prefill)
            request.to_prefill -= chunk
            budget -= chunk
            batch.prefill_tokens += chunk
            if request.to_prefill == 0:
                batch.prefilled.append(self._prefilling.popleft())
        return batch

    def _admit(self, now: float) -> bool:
        """Starts the first waiting request, if there is one and room for it."""
        limits = self._limits
        if not self.waiting or len(self.running) >= limits.max_num_seqs:
            return False
        request = self.waiting[0]
        if self._blocks(request.context) > limits.kv_blocks - self.used_blocks:
            return False
        self.waiting.popleft()
        self.running[request] = None
        self.used_blocks += self._blocks(request.context)
        request.to_prefill = request.context
        if request.scheduled_s is None:
            request.scheduled_s = now
            if limits.prefix_caching:
                warm = min(int(limits.warm_prefix * request.prompt_tokens), request.prompt_tokens - 1)
                request.cached_tokens = max(self.prefixes.found(request.key), warm)
                self.statistics.prefix_queries += request.prompt_tokens
                self.statistics.prefix_hits += request.cached_tokens
            request.to_prefill -= request.cached_tokens
        self._prefilling.append(request)
        return True

    def complete(self, step: int, now: float, step_s: float, batch: Batch) -> list[Request]:
        """Hands out the tokens of ``step``, which ends at ``now``, and returns the requests that end with it."""
        self.statistics.stepped(step_s, decoded=self.decoding, prefilled=len(batch.prefilled),
                                prefill_tokens=batch.prefill_tokens)
        # A bucket may hold sequences that were preempted since, and one twice that came back at once.
        ended = [request for request in dict.fromkeys(self._ending.pop(step, ())) if request.last_step == step]
        for request in ended:
            self._stop_decoding(request, step)
            del self.running[request]
        for request in batch.prefilled:
            if request not in self.running:
                continue                            # aborted while the step ran
            if self._prefilled(request, step, now):
                self.used_blocks -= self._blocks(request.context - 1)
                del self.running[request]
                ended.append(request)
        return ended

    def _prefilled(self, request: Request, step: int, now: float) -> bool:
        """Gives ``request`` its token of the prefill just done; True if that was its last."""
        if request.first_token_s is None:
            request.first_token_s = now
            self.prefixes.add(request.key, request.prompt_tokens)
            self.statistics.prompt_tokens += request.prompt_tokens
            self.statistics.prompt_tokens_cached += request.cached_tokens
            self.statistics.time_to_first_token.observe(now - request.arrival_s)
        else:
            request.gaps_s.append(now - request.last_token_s)
            self.statistics.inter_token_latency.observe(request.gaps_s[-1])
        computed = request.context
        request.generated += 1
        if request.generated >= request.output_tokens:
            return True
        request.joined = step
        request.last_step = step + request.output_tokens - request.generated
        self._ending.setdefault(request.last_step, []).append(request)
        # The next step writes position `computed`: a new block if that is a multiple of the block size.
        self._growing[(step + 1 - computed) % self._limits.block_size] += 1
        self.decoding += 1
        self.context += computed
        return False

    def _preempt(self, request: Request, step: int, now: float) -> None:
        """Takes ``request`` out before ``step``; it comes first when there is room again."""
        if request.joined >= 0:
            request.last_token_s = now
        self.remove(request, step - 1)
        request.preemptions += 1
        self.statistics.preemptions += 1
        self.waiting.appendleft(request)

    def remove(self, request: Request, last_step: int) -> None:
        """Takes a running ``request`` out, whose last token came with ``last_step``; its blocks become free."""
        if request.joined >= 0:
            self._stop_decoding(request, last_step)
        else:
            self.used_blocks -= self._blocks(request.context)
            if request in self._prefilling:
                self._prefilling.remove(request)
        del self.running[request]

    def _stop_decoding(self, request: Request, last_step: int) -> None:
        computed = request.context - 1
        self._growing[(request.joined + 1 - computed) % self._limits.block_size] -= 1
        request.generated += last_step - request.joined
        self.used_blocks -= self._blocks(request.context - 1)
        self.decoding -= 1
        self.context -= request.context - 1
        request.joined = request.last_step = -1

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)


StepTime = Callable[[int, int, int], float]
"""(tokens over all ranks, tokens of the busiest rank, context of the fullest rank) → seconds."""

Observer = Callable[[float, float, int, int], None]
"""Told of each step: (its end, its seconds, tokens decoded, tokens from prefills)."""


class Engine:
    """All ranks and their virtual clock, in seconds from the engine's start."""

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.limits = limits
        self.ranks = [Rank(limits) for _ in range(limits.ranks)]
        self.now = 0.0
        self.observers: list[Observer] = []
        self.stall_s = 0.0
        """Seconds that the next step takes on top of its own (a kernel is compiled)."""
        self._step_time = step_time
        self._step = 0
        self._began_s = 0.0
        self._ends_s: float | None = None
        self._batches: list[Batch] = []

    @property
    def next_event_s(self) -> float | None:
        """When something will happen by itself; None when there is nothing to do."""
        if self._ends_s is None and self.in_flight:
            return self.now
        return self._ends_s

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return sum(len(rank.running) + len(rank.waiting) for rank in self.ranks)

    def submit(self, request: Request) -> None:
        """Takes in ``request`` now, at the rank with the least to do (vLLM's score: 4 × waiting + running).

        Raises:
            ValueError: the KV cache of a rank could never hold it.
        """
        if request.prompt_tokens + request.output_tokens > self.limits.kv_blocks * self.limits.block_size:
            raise ValueError(f"{request.prompt_tokens} + {request.output_tokens} tokens do not fit into the KV cache")
        request.arrival_s = self.now
        request.rank = min(range(len(self.ranks)),
                           key=lambda i: 4 * len(self.ranks[i].waiting) + len(self.ranks[i].running))
        self.ranks[request.rank].waiting.append(request)

    def abort(self, request: Request) -> None:
        """Takes ``request`` out, wherever it is."""
        if request.reason is not None:
            return
        rank = self.ranks[request.rank]
        if request in rank.running:
            rank.remove(request, self._step - (1 if self._ends_s is None else 0))
        else:
            rank.waiting.remove(request)
        self._end(request, "abort")

    def tokens_of(self, request: Request) -> int:
        """Tokens that ``request`` has given so far."""
        done = self._step - 1           # the last step that has ended
        return request.generated + (done - request.joined if request.joined >= 0 else 0)

    def advance(self, until_s: float, max_steps: int | None = None) -> None:
        """Lets the clock run to ``until_s``, or for ``max_steps`` steps if that comes first."""
        steps = 0
        if self._ends_s is None:
            self._begin()
        while self._ends_s is not None and self._ends_s <= until_s:
            if steps == max_steps:
                return
            self.step()
            steps += 1
        self.now = max(self.now, until_s)

    def step(self) -> None:
        """Lets the clock run to the end of the step in flight, and begins the next one. Nothing to do: nothing."""
        if self._ends_s is None:
            self._begin()
        if self._ends_s is not None:
            self._complete(self._ends_s)
            self._begin()

    def _begin(self) -> None:
        batches = [rank.schedule(self._step, self.now) for rank in self.ranks]
        tokens = [batch.decoding + batch.prefill_tokens for batch in batches]
        total = sum(tokens)
        if total:
            self._batches = batches
            self._began_s = self.now
            context = max(rank.context for rank in self.ranks)
            self._ends_s = self.now + self._step_time(total, max(tokens), context) + self.stall_s
            self.stall_s = 0.0

    def _complete(self, now: float) -> None:
        self.now = now
        step_s = now - self._began_s
        self._ends_s = None
        step, self._step = self._step, self._step + 1
        ended: list[Request] = []
        for rank, batch in zip(self.ranks, self._batches, strict=True):
            ended += rank.complete(step, now, step_s, batch)
        for observer in tuple(self.observers):
            observer(now, step_s, sum(batch.decoding for batch in self._batches),
                     sum(len(batch.prefilled) for batch in self._batches))
        for request in ended:
            self._end(request, request.end_reason)

    def _end(self, request: Request, reason: str) -> None:
        request.end_s = self.now
        request.reason = reason
        self.ranks[request.rank].statistics.ended(request)
        if request.on_end:
            request.on_end(request)
