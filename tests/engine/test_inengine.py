"""What the package puts into the real engine: facts from every process, and a guard before every route."""

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from isambard_serve import audit, enginelog, outputs, validity
from isambard_serve.binding import Binding
from isambard_serve.engine import EngineClient
from isambard_serve.evidence import Evidence, Measured, Verdict
from isambard_serve.plan import Point
from isambard_serve.recipe import Expect
from isambard_serve.records import EngineFacts
from isambard_serve.topology import NumaNode, Topology
from tests.engine.environment import VLLM_VERSION
from tests.engine.serving import Engine
from tests.support.waiting import wait_until

ROUTE = re.compile(r"Route: (\S+), Methods: (.+)")


def facts(engine: Engine) -> dict[str, EngineFacts]:
    """The facts of each process by its role, once the worker has said all."""

    def written() -> dict[str, EngineFacts] | None:
        paths = (engine.folder / "facts").glob("*.json")
        every = [msgspec.json.decode(path.read_bytes(), type=EngineFacts) for path in paths]
        found: dict[str, EngineFacts] = {role: each for each in every for role in each.roles}
        return found if "worker" in found and found["worker"].moe_backend is not None else None

    found = wait_until(written, 30, "the worker's facts")
    assert found is not None
    return found


def test_every_process_says_who_it_is_and_what_it_really_has(engine: Engine) -> None:
    found = facts(engine)
    assert set(found) == {"api_server", "engine_core", "worker"}
    server, core, worker = (found[role] for role in ("api_server", "engine_core", "worker"))
    assert (core.ppid, worker.ppid) == (server.pid, core.pid)
    for each in found.values():
        process = psutil.Process(each.pid)
        assert (each.ppid, each.ns_pids[-1]) == (process.ppid(), each.pid)
        assert each.engine_version is not None
        assert each.engine_version.startswith(VLLM_VERSION)
        assert each.cpus_allowed
        assert (each.mems_allowed, each.errors) == ("0", ())
        shown = {"SHOWN": "yes", "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype":"float8e4m3"}'}
        assert shown.items() <= each.environment.items()
        assert not {"VLLM_API_KEY", "SHOWN_TOKEN", "HOME"} & set(each.environment)


@pytest.mark.parametrize("told", [True, False])
def test_the_audit_finds_each_of_them_in_its_role_by_what_it_says_or_by_its_title(engine: Engine, told: bool) -> None:
    found = facts(engine)
    server, core, worker = (found[role].pid for role in ("api_server", "engine_core", "worker"))
    roles = {each.pid: each.role for each in audit.see(Path("/"), server, found.values() if told else ())}
    assert (roles.pop(core), roles.pop(worker)) == ("core", "rank")
    assert server in roles
    assert set(roles.values()) == {"server"}


def test_the_real_servers_threads_are_moved_off_the_ranks_cores(engine: Engine) -> None:
    found = facts(engine)
    server, worker = found["api_server"].pid, found["worker"].pid
    before = {pid: os.sched_getaffinity(pid) for pid in (server, worker)}
    first, *_, last = sorted(before[server])
    topology = Topology(nodes=(NumaNode(node=0, cpus=f"{first}-{last}", memory_gib=1.0),), gpus=(),
                        cpus_allowed=f"{first}-{last}", mems_allowed="0", page_kib=4, numa_balancing=False)
    bound = Binding(gpu_nodes=(0,), gpu_cpus=(str(first),), memory="0", server_cpus=str(last))
    try:
        result = audit.settle(Path("/"), server, list(found.values()), topology, bound)
        assert not [finding for finding in result.findings if "are not the ranks'" in finding]
        for pid, cpus in ((server, {last}), (worker, before[worker] - {last} or before[worker])):
            threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
            assert len(threads) > 1
            assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} <= {frozenset(cpus)}
    finally:
        for pid, cpus in before.items():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cpus)


def test_the_worker_names_its_rank_and_its_kernels_and_no_gpu_that_it_has_not(engine: Engine) -> None:
    worker = facts(engine)["worker"]
    assert (worker.data_parallel_rank, worker.rank, worker.tensor_parallel_rank, worker.local_rank) == (0, 0, 0, 0)
    assert (worker.moe_backend, worker.input_quant) == ((), ())
    assert (worker.attention_backend, worker.kv_cache_dtype) == (("CPU_ATTN",), ("auto",))
    assert (worker.device_type, worker.device) == ("cpu", None)


def test_the_key_is_demanded_on_every_route_but_health(engine: Engine) -> None:
    routes = [(path, method) for path, methods in ROUTE.findall(engine.log) for method in methods.split(", ")]
    assert len(routes) > 30
    assert {"/metrics", "/invocations", "/tokenize", "/health"} <= {path for path, _ in routes}
    for key in ("", engine.key[:-1], engine.key + "0"):
        answers = {(path, method): engine.ask(path, key=key, method=method)[0] for path, method in routes}
        assert answers.pop(("/health", "GET")) == 200
        assert set(answers.values()) == {401}
    assert engine.ask("/no/such/route", key="")[0] == 401
    assert engine.ask("/metrics")[0] == 200


def judged(engine: Engine, code: str, **asked: Any) -> Verdict:
    """A rule's verdict on a point of this engine, of which nothing else is known."""
    evidence = Evidence(facts=tuple(facts(engine).values()), log=enginelog.read(engine.log.splitlines()))
    point = Point(concurrency=1, repeat=1, prompts=2, seed=0)
    return validity.RULES[code](Measured(bench=None, returncode=0, point=point, isl=1, osl=1, min_window_s=0,
                                         evidence=evidence, **asked))


def test_what_is_expected_is_found_on_the_real_engine_and_what_it_is_not_is_refuted(engine: Engine) -> None:
    right = judged(engine, "expected", version=VLLM_VERSION,
                   expect=Expect(attention_backend="CPU_ATTN", kv_cache_dtype="auto"))
    assert right.outcome == "verified", right
    wrong = judged(engine, "expected", version="0.26.0", expect=Expect(moe_backend="humming", kv_cache_dtype="fp8"))
    assert wrong.outcome == "refuted"
    for finding in ("has moe_backend none", "not humming", "has kv_cache_dtype auto", "not fp8",
                    "0.26.0 was asked for"):
        assert finding in wrong.why
    missing = judged(engine, "expected", ranks=2, expect=Expect(kv_cache_dtype="auto"))
    assert (missing.outcome, missing.why) == ("unknown", "kv_cache_dtype: nothing is known of 1 of 2 ranks")


def test_the_variables_that_were_set_have_arrived_in_the_real_worker(engine: Engine) -> None:
    name = "VLLM_HUMMING_INPUT_QUANT_CONFIG"
    assert judged(engine, "environment", variables={name: '{"dtype":"float8e4m3"}'}).outcome == "verified"
    assert judged(engine, "environment", variables={name: "{}"}).outcome == "refuted"
    assert judged(engine, "environment", variables={"VLLM_OTHER": "1"}).why == "DP rank 0, TP rank 0 has no VLLM_OTHER"


def test_what_cannot_be_seen_on_a_cpu_is_unknown_and_what_means_nothing_there_does_not_apply(engine: Engine) -> None:
    assert judged(engine, "throttled").outcome == "not_applicable"
    log = enginelog.read(engine.log.splitlines())
    assert (log.version, log.known, log.monitors) == (VLLM_VERSION, True, False)
    assert (log.kv_cache_tokens or 0) > 1000


def test_the_real_engine_answers_the_fixed_prompts_alike_each_time(engine: Engine) -> None:
    client = EngineClient(engine.url, engine.key)
    first, second = outputs.ask(client, "tiny"), outputs.ask(client, "tiny")
    assert [len(answer.tokens or ()) for answer in first.answers] == [outputs.MAX_TOKENS] * 20
    assert not [each for each in outputs.partings(first, second) if each.parted]
