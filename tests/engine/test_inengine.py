"""What the package puts into the real engine: facts from every process, and a guard before every route."""

import os
import re
from pathlib import Path

import msgspec
import psutil
import pytest

from isambard_serve import audit
from isambard_serve.binding import Binding
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
