"""The records that runs leave behind and that ``--json`` prints. Their names are stable.

Times are seconds since the epoch, UTC. Every document that leaves the package carries ``schema``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

STATES = (
    "submitted",
    "started",
    "loading",
    "ready",
    "measuring",
    "stopping",
    "done",
    "failed",
    "cancelled",
    "unknown",
)
"""What a run can be, in the order it goes through; the last four are ends (``unknown``: nobody can say)."""

State = Literal[
    "submitted", "started", "loading", "ready", "measuring", "stopping", "done", "failed", "cancelled", "unknown"
]

Writer = Literal["submit", "serve", "sweep", "inside", "task", "cancel"]
"""Who writes events: the submission, the watcher, the sweep's job, the sweep inside the serve job, a task, ``cancel``.
"""

HOLDERS: tuple[Literal["serve", "task"], ...] = ("serve", "task")
"""The job that a run stands and falls with, by what it does: a run has one of the two."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every record: immutable, strict when read."""


class Event(Record, frozen=True):
    """Something that happened to a run; one line of ``events/<writer>.jsonl``.

    ``event`` is the state entered, or a word of the writer's own (``point``, ``finished``, ``note``).
    """

    time: float
    writer: Writer
    event: str
    reason: str | None = None
    job_id: str | None = None
    point: str | None = None


class Sample(Record, frozen=True):
    """One reading of the engine's ``/metrics``, summed over its DP ranks (KV cache: the fullest rank).

    Counters (``*_total``) count from the engine's start. ``kv_cache_usage``: 1.0 is full. None: the engine has no
    such metric. ``scrape_ms``: how long the reading took. ``engine_time_s``: the engine's own clock, if its time is
    not ours (it is simulated).
    """

    time: float
    scrape_ms: float
    engine_time_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    requests_total: float | None = None
    prefix_cache_queries_total: float | None = None
    prefix_cache_hits_total: float | None = None


class Device(Record, frozen=True):
    """A GPU: its PCI address as ``00000000:0A:00.0``, and its UUID as nvidia-smi writes it."""

    name: str
    uuid: str
    pci_bus_id: str


class EngineFacts(Record, frozen=True):
    """What one engine process says of itself (``engine/facts/<pid>.json``); None where it cannot be seen from there.

    A process may be EngineCore and worker in one. ``pid`` and ``ppid`` are those of its own pid namespace;
    ``ns_pids`` are its pids from the outermost namespace that it sees to its own. ``cpus_allowed`` and
    ``mems_allowed`` are the kernel's lists, such as ``0-71,144-215``. ``rank`` counts within the DP replica;
    ``device_type`` is what it computes on, ``cuda`` or ``cpu``.
    ``environment`` has no secrets. The kernels (``moe_backend``, ``attention_backend``, ``kv_cache_dtype``,
    ``input_quant``: what the experts' input is quantised to) are those of all layers of a worker's model, without
    repetition; an empty list says that the model has no such layer.
    """

    schema: str
    time: float
    pid: int
    ppid: int
    ns_pids: tuple[int, ...]
    roles: tuple[Literal["api_server", "engine_core", "worker"], ...]
    engine_version: str | None
    data_parallel_rank: int | None
    tensor_parallel_rank: int | None
    rank: int | None
    local_rank: int | None
    cpus_allowed: str | None
    mems_allowed: str | None
    device_type: str | None
    device: Device | None
    environment: dict[str, str]
    moe_backend: tuple[str, ...] | None
    attention_backend: tuple[str, ...] | None
    kv_cache_dtype: tuple[str, ...] | None
    input_quant: tuple[str, ...] | None
    errors: tuple[str, ...]


class Answer(Record, frozen=True):
    """One answer of the engine: its text, and its tokens where the engine gives them."""

    text: str
    tokens: tuple[int, ...] | None


class Outputs(Record, frozen=True):
    """``outputs.json``: the engine's greedy answers to fixed prompts, in their order."""

    time: float
    took_s: float
    max_tokens: int
    prompts: tuple[str, ...]
    answers: tuple[Answer, ...]
    schema: str = "isambard-serve/outputs/1"


class ClientFacts(Record, frozen=True):
    """How the load generator fared while it measured a point (its ``client.json``); None where it was too short.

    ``cpu_share`` of one core, and the 99th percentile of how late its event loop woke: at a share near 1, or a lag
    that is not small beside the time between two tokens, the client was measured and not the engine.
    """

    cpu_share: float | None
    loop_lag_p99_ms: float | None


class GpuSample(Record, frozen=True):
    """One look at a GPU (a line of ``gpus.jsonl``): ``gpu`` is its UUID, ``reasons`` NVML's bits for a low clock."""

    time: float
    gpu: str
    sm_mhz: float
    power_w: float
    temperature_c: float
    reasons: int


class Row(Record, frozen=True):
    """One measured point. ``None`` where the benchmark gave no number.

    ``tok_s_per_user`` is 1000 / median TPOT in ms; ``node_hours`` and ``output_tok_per_node_hour`` cover the
    measured window alone. ``valid`` is true only if no rule refuted the row (``reasons``); ``unknown`` names the
    rules that could not be judged, ``not_applicable`` those that mean nothing here, and ``details`` says for each of
    the three what was found. ``power_capped`` is the share of looks at the GPUs that found their clocks lowered by
    the power cap. ``simulated``: the engine was, and no number is a measurement; its clock runs ``time_scale`` times
    as fast as the wall's. ``run_id`` and ``node`` are where it was measured, also when another run has taken it over.
    """

    run_id: str
    recipe: str
    simulated: bool
    node: str
    concurrency: int
    repeat: int
    output_tok_s: float | None
    output_tok_s_per_gpu: float | None
    total_tok_s: float | None
    ratio: float | None
    tok_s_per_user: float | None
    median_ttft_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    kv_cache_usage_max: float | None
    preemptions: float | None
    duration_s: float | None
    time_scale: float
    node_hours: float | None
    output_tok_per_node_hour: float | None
    power_capped: float | None
    valid: bool
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    not_applicable: tuple[str, ...]
    details: dict[str, str]
    schema: str = "isambard-serve/row/1"


class Repeats(Record, frozen=True):
    """The points of one concurrency of a run: how many were ``measured``, and of the ``valid`` ones the median.

    ``output_tok_s_spread`` is (largest - smallest) / median, None of fewer than two.
    """

    recipe: str
    concurrency: int
    measured: int
    valid: int
    output_tok_s_median: float | None
    output_tok_s_spread: float | None


class RunVerdict(Record, frozen=True):
    """What a run came to: ``text`` says it in words.

    ``concurrency`` is its knee, the smallest within 2 % of the best valid throughput; ``output_tok_s`` the median
    there; ``ratio`` that to the knee of the recipe ``over``, the first of those that it is compared with. ``bound`` is
    what the engine was short of, where that was seen. These are None where no point is valid. ``medians`` has an entry
    for each concurrency.
    """

    text: str
    concurrency: int | None
    output_tok_s: float | None
    ratio: float | None
    over: str | None
    bound: Literal["kv", "waiting", "preemptions", "plateau", "max_num_seqs"] | None
    medians: tuple[Repeats, ...]


class Run(Record, frozen=True):
    """A run as ``status`` and ``collect`` report it. ``points_invalid`` counts those whose row is
    not valid, or cannot be read.

    ``ladder`` is the run id of the ladder's first rung, if the run is one of several that were submitted together.
    ``node_hours`` is what its jobs have held so far: by the site's accounting (``sacct``) once all have ended there,
    else by the run's own ``clock``, which leaves out what lies before the first word and after the last.
    ``points_planned`` is None where a search decides as it goes.
    ``binding`` is how the audit of the engine's processes came out, in one line; null before it was made.
    ``url`` is where a server for people answers while it does, and ``key_file`` the file with the key that it demands.
    ``verdict`` is what its points came to so far; null before the first.
    """

    run_id: str
    recipe: str
    ladder: str | None
    site: str
    simulated: bool
    state: State
    reason: str | None
    jobs: dict[str, str]
    node_hours: float | None
    node_hours_by: Literal["sacct", "clock"]
    directory: str
    points_done: int
    points_planned: int | None
    points_invalid: int
    binding: str | None
    url: str | None
    key_file: str | None
    verdict: RunVerdict | None
    schema: str = "isambard-serve/run/1"


class Endpoint(Record, frozen=True):
    """Where the engine answers, and the file (mode 0600) that holds the key it demands."""

    url: str
    model: str
    node: str
    job_id: str | None
    key_file: str
    schema: str = "isambard-serve/endpoint/1"


class SubmittedJob(Record, frozen=True):
    """One job's line in ``jobs.json``: written before its submission (no ``job_id``) and again after it."""

    role: Literal["serve", "sweep", "task", "controller"]
    job_id: str | None
    time: float


class Jobs(Record, frozen=True):
    """``jobs.json``: what was submitted for a run, written around each step. ``complete``: all of it was."""

    jobs: tuple[SubmittedJob, ...] = ()
    complete: bool = False
    schema: str = "isambard-serve/jobs/1"


class Bucket(Record, frozen=True):
    """What one bucket of kernels takes of a step, in ms: only time in which no other bucket has it (``trace``).

    ``share`` is that of the whole step, ``launches`` how many kernels a step starts (None for ``idle``), ``floor_ms``
    the least that they could take on this GPU; None where that is not known.
    """

    name: str
    ms: float
    share: float
    launches: float | None
    floor_ms: float | None


class UnmatchedKernel(Record, frozen=True):
    """A kernel that no pattern of the table matches: what it takes of a step, and how often a step starts it."""

    name: str
    ms: float
    launches: float


class RankTrace(Record, frozen=True):
    """One GPU's trace. All but ``kernels`` and ``kernel_ms``, which are of all that was recorded, is of a steady step.

    ``kernel_ms`` adds up the kernels' durations: what overlaps counts twice. ``found_by`` says how the steps were
    found (by ``nothing``: all is taken for one step), ``left_out`` how many of them were not steady. ``hidden_ms`` is
    how long kernels meant for the background, comms above all, ran behind others; their bucket has only the rest.
    """

    rank: int
    path: str
    gpu: str | None
    kernels: int
    kernel_ms: float
    found_by: Literal["marks", "graphs", "repetition", "nothing"]
    steps: int
    left_out: int
    step_ms: float
    busy_ms: float
    launches: float
    buckets: tuple[Bucket, ...]
    hidden_ms: dict[str, float]
    unmatched_ms: float
    unmatched: tuple[UnmatchedKernel, ...]


class Trace(Record, frozen=True):
    """Where a steady step's time goes: the mean over ``ranks``. ``steps``: of how many on the rank with fewest.

    The buckets and what is unmatched add up to ``step_ms``. ``unmatched_share`` is that of the GPUs' busy time.
    """

    ranks: tuple[RankTrace, ...]
    steps: int
    step_ms: float
    buckets: tuple[Bucket, ...]
    unmatched_share: float


def document(kind: str, **content: Any) -> bytes:
    """A JSON document of ``content`` that carries its ``schema``, ready to print."""
    body = msgspec.json.encode({"schema": f"isambard-serve/{kind}/1", **content})
    return msgspec.json.format(body, indent=2)
