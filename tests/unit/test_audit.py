"""The audit: a process that is not where it belongs is found, and what cannot be seen is not taken for right."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import pytest

from isambard_serve import audit, binding, topology
from isambard_serve.audit import Audit, Seen
from isambard_serve.binding import Binding
from isambard_serve.records import Device, EngineFacts
from isambard_serve.topology import Topology
from tests.support.waiting import wait_until
from tests.unit import machines
from tests.unit.helpers import Shown

APPTAINER, MAIN = 90, 100
RANKS = range(110, 114)
CHIPS = {0: "0-63", 1: "72-135", 2: "144-207", 3: "216-279"}
SERVERS = "64-71,136-143,208-215,280-287"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A quad GH200 on which four ranks and an API server in a container run as they should."""
    machines.quad_gh200(tmp_path)
    machines.process(tmp_path, 1, 0, "init", cpus="0-287")
    machines.process(tmp_path, APPTAINER, 1, "Apptainer runtime parent", cpus="0-287", policy=None)
    machines.process(tmp_path, MAIN, APPTAINER, "python3 vllm serve x", cpus=SERVERS, policy="bind:0-3")
    machines.process(tmp_path, 120, MAIN, "VLLM::APIServer_0", cpus=SERVERS, policy="bind:0-3", pages={0: 9, 2: 9},
                     own_pid=20)
    for chip, pid in enumerate(RANKS):
        rank(tmp_path, pid, chip)
        machines.process(tmp_path, pid + 100, pid, "nvcc helper", cpus="0-287")
    return tmp_path


def rank(root: Path, pid: int, chip: int, **changes: object) -> None:
    """The rank ``pid`` on a chip, but for ``changes``."""
    values = {"cpus": CHIPS[chip], "policy": f"bind:{chip}", "pages": {chip: 16000, 0: 100}, "own_pid": pid - 100,
              **changes}
    machines.process(root, pid, MAIN, f"VLLM::EngineCore_DP{pid - RANKS[0]}", **values)  # type: ignore[arg-type]


def fact(pid: int, gpu: int | None = None, roles: tuple[str, ...] = ("engine_core", "worker")) -> EngineFacts:
    """What the process ``pid`` of a container says of itself: it uses the GPU of chip ``gpu``."""
    names = [field.name for field in msgspec.structs.fields(EngineFacts)]
    device = None if gpu is None else Device(name="GH200", uuid="GPU-x", pci_bus_id=f"000000{gpu}9:01:00.0")
    values = {"pid": pid, "roles": roles, "device": device}
    return EngineFacts(**{**dict.fromkeys(names), **values})  # type: ignore[arg-type]


def audited(root: Path, gpus: dict[int, int] | None = None) -> Audit:
    """The audit of the engine on that node; what the ranks say of their GPUs is ``gpus``, or what it should be."""
    machine = topology.read(root, machines.quad_gh200(root), None)
    uses = dict(zip(RANKS, range(4), strict=True)) if gpus is None else gpus
    facts = [fact(pid - 100, gpu) for pid, gpu in uses.items()]
    seen = audit.see(root, APPTAINER, [*facts, fact(20, roles=("api_server",))])
    refuted, unknown = audit.judge(seen, machine, binding.choose(machine))
    return Audit(verdict=False if refuted else None if unknown else True, findings=(*refuted, *unknown),
                 processes=tuple(seen))


def test_an_engine_that_is_bound_as_meant_passes(node: Path) -> None:
    result = audited(node)
    assert (result.verdict, result.findings) == (True, ())
    assert [process.pid for process in result.processes] == [MAIN, *RANKS, 120]
    assert [process.role for process in result.processes] == ["server", *["rank"] * 4, "server"]
    assert result.processes[3].memory_mib == {0: 6.2, 2: 1000.0}
    assert result.summary == "bound as meant: 4 ranks and what serves them"


def test_a_rank_on_the_wrong_chip_is_found(node: Path) -> None:
    rank(node, RANKS[2], 0, pages={})
    result = audited(node)
    assert result.verdict is False
    assert result.findings == ("VLLM::EngineCore_DP2 (pid 112, GPU 0029:01:00.0) may run on CPUs 0-63, beside NUMA "
                               "nodes 0: its GPU is beside 2",)


def test_a_rank_whose_memory_goes_to_another_chip_is_found(node: Path) -> None:
    rank(node, RANKS[2], 2, policy="bind:2-3")
    assert audited(node).findings == ("VLLM::EngineCore_DP2 (pid 112, GPU 0029:01:00.0) may put its memory on NUMA "
                                      "nodes 2-3: its GPU is beside 2",)


def test_ranks_that_have_changed_places_are_found(node: Path) -> None:
    result = audited(node, {110: 1, 111: 0, 112: 2, 113: 3})
    assert result.verdict is False
    assert len([finding for finding in result.findings if "may run on CPUs" in finding]) == 2


def test_ranks_are_known_by_what_they_say_whatever_their_titles(node: Path) -> None:
    machines.process(node, RANKS[1], MAIN, "python3 -c spawn", cpus=CHIPS[1], policy="bind:1", own_pid=11)
    result = audited(node)
    assert result.verdict is True
    assert [process.gpu for process in result.processes[1:5]] == [f"00{chip}9:01:00.0" for chip in range(4)]


def test_two_ranks_on_one_gpu_are_found(node: Path) -> None:
    rank(node, RANKS[1], 0, pages={})
    result = audited(node, {110: 0, 111: 0, 112: 2, 113: 3})
    assert result.findings == ("several ranks use GPU 0009:01:00.0",)


@pytest.mark.parametrize("gpus", [None, {}])
def test_a_rank_with_all_cpus_is_found_whether_its_gpu_is_known_or_not(
        node: Path, gpus: dict[int, int] | None) -> None:
    rank(node, RANKS[1], 1, cpus="0-287")
    result = audited(node, gpus)
    assert result.verdict is False
    assert "may run on CPUs 0-287, beside NUMA nodes 0-3" in result.findings[0]
    assert result.summary.startswith("WRONG: VLLM::EngineCore_DP1 (pid 111")


def test_hbm_among_the_memory_that_a_process_may_use_is_found(node: Path) -> None:
    rank(node, RANKS[3], 3, policy="default")
    machines.process(node, 120, MAIN, "VLLM::APIServer_0", cpus=SERVERS, policy="prefer:0")
    findings = audited(node).findings
    assert [finding for finding in findings if "HBM" in finding] == [
        "VLLM::EngineCore_DP3 (pid 113, GPU 0039:01:00.0) may put its memory into HBM (NUMA nodes 4,12,20,28)",
        "VLLM::APIServer_0 (pid 120) may put its memory into HBM (NUMA nodes 4,12,20,28)"]


def test_hbm_that_the_jobs_own_limits_rule_out_is_no_danger(node: Path) -> None:
    machines.process(node, 120, MAIN, "VLLM::APIServer_0", cpus=SERVERS, policy="default", mems="0-3")
    assert audited(node).verdict is True


def test_an_api_server_that_was_not_bound_is_found(node: Path) -> None:
    machines.process(node, 120, MAIN, "VLLM::APIServer_0", cpus="0-287", policy="bind:0-3")
    result = audited(node)
    assert result.findings == (
        f"VLLM::APIServer_0 (pid 120) may run on CPUs 0-287, of which only {SERVERS} are not the ranks'",)


def test_memory_that_lies_on_another_chip_is_found_and_a_little_of_it_is_not(node: Path) -> None:
    rank(node, RANKS[1], 1, pages={1: 16000, 0: 800})
    assert audited(node).verdict is True
    rank(node, RANKS[1], 1, pages={1: 16000, 0: 900})
    assert "has 56 of its 1,056 MiB of memory elsewhere: its GPU is beside 1" in audited(node).findings[0]


def test_what_cannot_be_seen_is_not_known_and_never_right(node: Path) -> None:
    assert audited(node, {}).verdict is None
    rank(node, RANKS[1], 1, policy=None)
    (node / f"proc/{RANKS[1]}/numa_maps").unlink()
    result = audited(node)
    assert result.verdict is None
    assert result.findings == ("VLLM::EngineCore_DP1 (pid 111, GPU 0019:01:00.0): its memory policy cannot be read",)
    rank(node, RANKS[1], 1)
    status = node / f"proc/{RANKS[1]}/status"
    status.write_text(re.sub(r"(Cpus_allowed_list:\s*)\S+", r"\1?", status.read_text()))
    result = audited(node)
    assert result.verdict is None
    assert "which CPUs it may use cannot be read" in result.findings[0]
    assert result.summary.startswith("not known: VLLM::EngineCore_DP1")


def test_an_engine_without_a_rank_is_not_known(node: Path) -> None:
    machine = topology.read(node, machines.quad_gh200(node), None)
    assert audit.judge([], machine, binding.choose(machine)) == (
        [], ["no rank was found among the engine's processes"])
    assert audit.see(node, 4711) == []


def test_workers_of_their_own_are_the_ranks_and_their_engine_core_may_use_all_their_chips(node: Path) -> None:
    for pid in RANKS:
        machines.process(node, pid, 130, f"VLLM::Worker_TP{pid - RANKS[0]}", cpus=CHIPS[pid - RANKS[0]],
                         policy=f"bind:{pid - RANKS[0]}", own_pid=pid - 100)
    machines.process(node, 130, MAIN, "VLLM::EngineCore", cpus=",".join(CHIPS.values()), policy="bind:0-3")
    result = audited(node)
    assert (result.verdict, result.findings) == (True, ())
    assert {process.pid: process.role for process in result.processes}[130] == "core"


def test_a_job_that_could_not_be_bound_is_not_as_meant(node: Path) -> None:
    machine = topology.read(node, machines.quad_gh200(node, cpus="0-71"), None)
    refuted, _ = audit.judge(audit.see(node, APPTAINER), machine, binding.choose(machine))
    assert refuted[0].startswith("the job has no core beside GPU 0019:01:00.0")


def test_where_binding_does_not_apply_nothing_is_looked_at(tmp_path: Path) -> None:
    machine = topology.read(tmp_path, machines.laptop(tmp_path), None)
    result = audit.settle(tmp_path, 1, [], machine, binding.choose(machine))
    assert result == Audit(not_applicable="no GPU is visible here")
    assert result.summary == "not applicable: no GPU is visible here"


def affinities_of(pid: int) -> list[set[int]]:
    """The CPUs of each thread of a process."""
    return [os.sched_getaffinity(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


TWO_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to tell apart")


@TWO_CPUS
def test_on_real_processes_servers_are_moved_off_the_ranks_cores_with_all_their_threads(child: Shown) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    threads = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('on', flush=True)"
    engine = child("bash", "-c", f"""
        (exec -a VLLM::APIServer_0 {sys.executable} -c "{threads}") > /dev/null &
        (exec -a VLLM::EngineCore_DP0 {sys.executable} -c "{threads}") > /dev/null &
        wait""")
    root = Path("/")
    wait_until(lambda: len(audit.see(root, engine.pid)) == 3 and all(
        len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 2 for process in audit.see(root, engine.pid)[1:]),
        20, "the engine's processes", interval_s=0.02)
    here = Topology(nodes=(topology.NumaNode(node=0, cpus=f"{first},{second}", memory_gib=1.0),), gpus=(),
                    cpus_allowed=f"{first},{second}", mems_allowed="0", page_kib=4, numa_balancing=False)
    bound = Binding(gpu_nodes=(0,), gpu_cpus=(str(first),), memory="0", server_cpus=str(second))
    before = audit.judge(audit.see(root, engine.pid), here, bound)[0]
    assert len([finding for finding in before if "are not the ranks'" in finding]) == 2
    result = audit.settle(root, engine.pid, [], here, bound)
    assert not [finding for finding in result.findings if "are not the ranks'" in finding]
    affinities = {process.title.split()[0]: affinities_of(process.pid) for process in result.processes}
    assert affinities["VLLM::APIServer_0"] == [{second}, {second}]
    assert affinities["VLLM::EngineCore_DP0"] == [{first}, {first}]


def test_a_process_that_is_gone_cannot_be_moved_and_harms_nothing(child: Shown) -> None:
    gone = child("true")
    gone.wait()
    audit.narrow(Path("/"), gone.pid, [0])
    assert isinstance(audit.see(Path("/"), os.getpid()), list)


def test_a_process_reads_as_what_it_is() -> None:
    process = Seen(pid=7, title="VLLM::Worker", role="rank", gpu=None, cpus="0", mems="0-3,8", policy="bind=static:0,8",
                   memory_mib=None)
    assert str(process) == "VLLM::Worker (pid 7)"
    assert process.new_memory == {0, 8}
    assert msgspec.structs.replace(process, policy="local").new_memory == {0, 1, 2, 3, 8}


def test_an_audit_that_says_nothing_is_not_known() -> None:
    assert audit.Audit().summary == "not known: nobody says why"
