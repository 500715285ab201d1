"""A closed-loop load in virtual time: so many prompts, so many of them in flight, each followed by the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from isambard_serve.records import Record
from isambard_serve.sim.scheduler import Engine, Request


class Load(Record, frozen=True):
    """What ``vllm bench serve --dataset-name random --request-rate inf`` asks for. Prompts depend on the seed alone."""

    prompts: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    seed: int = 0
    model: str = ""


class Outcome(Record, frozen=True):
    """How one request of a load fared. Times in seconds from the load's start; ``error`` is None for a good one."""

    index: int
    sent_s: float
    first_token_s: float
    end_s: float
    output_tokens: int
    error: str | None = None


class Pace(Record, frozen=True):
    """How tokens came over a whole load.

    Attributes:
        gaps: (seconds between two tokens of a request, how often), in no order.
        peak_tok_s: most tokens of all requests that came within one second of the load.
    """

    gaps: list[tuple[float, int]]
    peak_tok_s: float


class ClosedLoop:
    """Keeps ``load.concurrency`` requests in ``engine`` until all prompts have been answered.

    The pace is that of the whole engine: other requests at the same time are counted in.

    Args:
        output_tokens: how many tokens the engine gives to a request; the load's own number unless said otherwise.
        fails: whether the next request is refused, asked once for each.
        on_outcome: called with each outcome.
    """

    def __init__(self, load: Load, engine: Engine, *, output_tokens: int | None = None,
                 fails: Callable[[], bool] = lambda: False,
                 on_outcome: Callable[[Outcome], None] = lambda _: None) -> None:
        self._load = load
        self._engine = engine
        self._output_tokens = load.output_tokens if output_tokens is None else output_tokens
        self._fails = fails
        self._on_outcome = on_outcome
        self._began_s = engine.now
        self._next = 0
        self._open: dict[Request, int] = {}
        self._gaps: Counter[float] = Counter()
        self._tokens: Counter[int] = Counter()
        self.outcomes: list[Outcome] = []
        engine.observers.append(self._stepped)
        self._send()
        if self.done:
            self._leave()

    @property
    def done(self) -> bool:
        """Whether every prompt has its outcome."""
        return len(self.outcomes) == self._load.prompts

    @property
    def pace(self) -> Pace:
        """The pace so far."""
        return Pace(gaps=list(self._gaps.items()), peak_tok_s=float(max(self._tokens.values(), default=0)))

    def run(self) -> None:
        """Lets the engine's clock run until all is done."""
        while not self.done:
            self._engine.step()

    def cancel(self) -> None:
        """Takes all that is in flight out of the engine and sends nothing more."""
        self._next = self._load.prompts
        for request in tuple(self._open):
            self._engine.abort(request)
        self._leave()

    def _send(self) -> None:
        load = self._load
        while self._next < load.prompts and len(self._open) < load.concurrency:
            index = self._next
            self._next += 1
            if self._fails():
                now = self._engine.now - self._began_s
                self._keep(Outcome(index=index, sent_s=now, first_token_s=now, end_s=now, output_tokens=0,
                                   error="Internal Server Error"))
                continue
            request = Request(prompt_tokens=load.input_tokens, output_tokens=self._output_tokens,
                              key=(load.seed, index, load.input_tokens), on_end=self._ended,
                              end_reason="length" if self._output_tokens >= load.output_tokens else "stop")
            self._open[request] = index
            self._engine.submit(request)

    def _ended(self, request: Request) -> None:
        index = self._open.pop(request)
        if request.reason == "abort" or request.first_token_s is None or request.end_s is None:
            return
        self._gaps.update(round(gap_s, 6) for gap_s in request.gaps_s)
        self._keep(Outcome(index=index, sent_s=request.arrival_s - self._began_s,
                           first_token_s=request.first_token_s - self._began_s,
                           end_s=request.end_s - self._began_s, output_tokens=request.generated))
        self._send()

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._on_outcome(outcome)
        if self.done:
            self._leave()

    def _leave(self) -> None:
        if self._stepped in self._engine.observers:
            self._engine.observers.remove(self._stepped)

    def _stepped(self, end_s: float, step_s: float, decoded: int, prefilled: int) -> None:
        self._gaps[round(step_s, 6)] += decoded
        self._tokens[int(end_s - self._began_s)] += decoded + prefilled
