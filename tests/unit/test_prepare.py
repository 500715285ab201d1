"""On the node, before the engine: the slots, the key, and what this node is."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import msgspec
import pytest

from isambard_serve import health, prepare
from isambard_serve.errors import ServeError
from isambard_serve.health import Health, bad_nodes
from isambard_serve.plan import Plan
from isambard_serve.prepare import NodeFacts
from isambard_serve.resend import RESENT
from isambard_serve.run import RunDir, Runs, read_record
from tests.unit import machines
from tests.unit.helpers import Stubs, small_plan, submitted, written_run

GPUS = """\
0, NVIDIA GH200 120GB, GPU-aa, 00000009:01:00.0, 565.57.01, 97871 MiB, 660.00 W, 1980 MHz, Default, Disabled
1, NVIDIA GH200 120GB, GPU-bb, 00000019:01:00.0, 565.57.01, 97871 MiB, [N/A], 1980 MHz, Exclusive_Process, Disabled
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return written_run(small_plan(tmp_path / "runs"))


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", prepare.free_port()))


def test_the_slots_are_filled_and_the_key_is_the_owners_alone(run: RunDir) -> None:
    prepare.prepare(run)
    name, _, port = run.slots.read_text().splitlines()[0].partition("=")
    assert (name, 0 < int(port) < 65536) == ("port", True)
    assert len(run.key.read_text()) >= 32
    assert stat.S_IMODE(run.key.stat().st_mode) == 0o600
    facts = msgspec.json.decode(run.node.read_bytes(), type=NodeFacts)
    assert facts.slots == {"port": port, "membind": [], "numa_bind": []}
    assert facts.open_files > 0
    assert facts.topology.cpus_allowed
    assert run.key.read_text() not in run.node.read_text() + run.slots.read_text()


def test_a_server_for_people_has_the_address_of_the_sites_interface_and_a_port_that_is_free_there(
        tmp_path: Path) -> None:
    run = written_run(small_plan(tmp_path / "runs", placement="none", interface="lo"))
    prepare.prepare(run)
    slots = dict(line.split("=", 1) for line in run.slots.read_text().splitlines())
    assert slots["host"] == "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((slots["host"], int(slots["port"])))


def test_where_the_site_names_no_interface_people_are_served_on_loopback() -> None:
    assert prepare.address(None) == "127.0.0.1"


def test_an_interface_that_the_node_has_not_is_named_with_those_that_it_has() -> None:
    with pytest.raises(ServeError, match=r"serve\.interface.*no address on 'hsn9'\n.*its interfaces: .*lo"):
        prepare.address("hsn9")


@pytest.fixture
def bound(tmp_path: Path, stubs: Stubs) -> tuple[RunDir, Path]:
    """A run that asks to be bound, and a quad GH200 that its job sees the first two GPUs of."""
    stubs.add("nvidia-smi", f"cat <<'EOF'\n{GPUS}EOF")
    stubs.add("numactl", 'if [ "$1" = --hardware ]; then echo "available: 36 nodes (0-35)"; else shift; exec "$@"; fi')
    machines.quad_gh200(tmp_path / "node")
    return written_run(small_plan(tmp_path / "runs", {"engine": {"args": {"numa-bind": True}}})), tmp_path / "node"


def test_what_to_bind_where_is_worked_out_and_left_for_the_script_and_the_record(bound: tuple[RunDir, Path]) -> None:
    run, root = bound
    prepare.prepare(run, root)
    assert run.slots.read_text().splitlines()[1:] == [
        "membind=(numactl --membind=0-3)",
        "numa_bind=(--numa-bind --numa-bind-nodes 0 1 --numa-bind-cpus 0-63 72-135)"]
    facts = msgspec.json.decode(run.node.read_bytes(), type=NodeFacts)
    assert facts.binding.gpu_nodes == (0, 1)
    assert facts.slots["membind"] == ["numactl", "--membind=0-3"]
    assert facts.numactl == "available: 36 nodes (0-35)\n"
    assert [gpu.pci for gpu in facts.topology.gpus] == ["0009:01:00.0", "0019:01:00.0"]
    notes = [str(event.reason) for event in run.read_events() if event.event == "note"]
    assert [note for note in notes if "pages are 64 KiB" in note]


def test_a_node_whose_memory_cannot_be_bound_binds_the_ranks_alone_and_says_so(
        bound: tuple[RunDir, Path], stubs: Stubs) -> None:
    run, root = bound
    stubs.add("numactl", "echo 'set_mempolicy: Operation not permitted' >&2; exit 1")
    prepare.prepare(run, root)
    facts = msgspec.json.decode(run.node.read_bytes(), type=NodeFacts)
    assert (facts.slots["membind"], facts.slots["numa_bind"][0]) == ([], "--numa-bind")
    assert any("--membind=0-3 does not work here" in str(event.reason) for event in run.read_events())
    assert facts.numactl is None


def test_a_job_that_was_given_the_wrong_cores_says_so_and_runs_unbound(tmp_path: Path, stubs: Stubs) -> None:
    stubs.add("nvidia-smi", f"cat <<'EOF'\n{GPUS}EOF")
    machines.quad_gh200(tmp_path, cpus="144-287")
    run = written_run(small_plan(tmp_path / "runs", {"engine": {"args": {"numa-bind": True}}}))
    prepare.prepare(run, tmp_path)
    assert run.slots.read_text().splitlines()[1:] == ["membind=()", "numa_bind=()"]
    assert "no core beside GPU 0009:01:00.0" in str(run.read_events()[1].reason)


def test_a_job_on_a_bad_node_starts_no_engine_remembers_the_node_and_is_sent_again(
        bound: tuple[RunDir, Path], stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    run, root = bound
    monkeypatch.setenv("SLURMD_NODENAME", "nid003")
    bad = Health(faults=("GPU GPU-aa: it hangs", "GPU GPU-bb: it hangs"))
    monkeypatch.setattr(health, "check", lambda uuids, env: bad)
    stubs.add("sbatch", 'echo "$*" > sent; echo 201')
    for program in ("scontrol", "squeue", "scancel"):
        stubs.add(program, "true")
    run.write_jobs(submitted())
    assert prepare.prepare(run, root) is False
    assert "--exclude=nid[001-002],nid003" in Path("sent").read_text()
    assert not run.slots.exists()
    assert not run.key.exists()
    assert msgspec.json.decode(run.node.read_bytes(), type=NodeFacts).health == bad
    assert [(node.node, node.run_id) for node in bad_nodes(run.path.parent)] == [("nid003", run.run_id)]
    why = "node nid003 is bad: GPU GPU-aa: it hangs; GPU GPU-bb: it hangs"
    assert str(run.read_events()[-1].reason).startswith(why)
    monkeypatch.setattr("sys.argv", ["prepare", str(run.path)])
    with pytest.raises(ServeError, match="a third is not tried"):
        prepare.main()
    assert run.read_events()[-1].event == "failed"


def test_the_script_ends_when_its_job_was_sent_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "prepare", lambda _: False)
    monkeypatch.setattr("sys.argv", ["prepare", str(run.path)])
    with pytest.raises(SystemExit) as end:
        prepare.main()
    assert end.value.code == RESENT
    assert run.read_events() == []


@pytest.mark.parametrize(("changes", "why"), [
    ({"simulated": True}, "simulated"), ({"numa_bind": False}, "does not ask for it"), ({}, "no GPU is visible")])
def test_where_binding_does_not_apply_the_record_says_why(tmp_path: Path, changes: dict[str, bool], why: str) -> None:
    plan = msgspec.structs.replace(small_plan(tmp_path / "runs"), **{"numa_bind": True, **changes})
    assert why in str(prepare.node_facts(plan).binding.not_applicable)


def test_two_runs_never_share_a_key(tmp_path: Path) -> None:
    first, second = (written_run(small_plan(tmp_path / name)) for name in ("a", "b"))
    prepare.prepare(first)
    prepare.prepare(second)
    assert first.key.read_text() != second.key.read_text()


def test_a_job_says_that_it_has_started_and_is_found_by_its_id(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "301")
    monkeypatch.setenv("SLURMD_NODENAME", "nid001")
    prepare.prepare(run)
    (event,) = run.read_events()
    assert (event.writer, event.event, event.job_id) == ("serve", "started", "301")
    assert Runs(run.path.parent, "pretend").find("301").path == run.path
    facts = msgspec.json.decode(run.node.read_bytes(), type=NodeFacts)
    assert (facts.node, facts.job_id) == ("nid001", "301")


def test_without_slurm_there_is_no_job_to_find(run: RunDir) -> None:
    prepare.prepare(run)
    assert run.read_events()[0].job_id is None
    assert not (run.path.parent / ".jobs").exists()


def test_each_gpu_is_described_in_nvidia_smis_own_words(stubs: Stubs) -> None:
    stubs.add("nvidia-smi", f"cat <<'EOF'\n{GPUS}EOF")
    gpus = prepare.visible_gpus({"PATH": str(stubs.folder) + ":/usr/bin:/bin"}) or []
    assert [gpu["uuid"] for gpu in gpus] == ["GPU-aa", "GPU-bb"]
    assert gpus[1] == {"index": "1", "name": "NVIDIA GH200 120GB", "uuid": "GPU-bb", "pci.bus_id": "00000019:01:00.0",
                       "driver_version": "565.57.01", "memory.total": "97871 MiB", "power.limit": "[N/A]",
                       "clocks.max.sm": "1980 MHz", "compute_mode": "Exclusive_Process",
                       "mig.mode.current": "Disabled"}


def test_a_node_without_nvidia_smi_or_with_a_broken_one_has_no_gpus_to_tell_of(stubs: Stubs) -> None:
    path = {"PATH": str(stubs.folder)}
    assert prepare.visible_gpus(path) == []
    stubs.add("nvidia-smi", "")

    stubs.add("nvidia-smi", "echo garbage; exit 9")
    assert prepare.visible_gpus({"PATH": f"{stubs.folder}:/usr/bin:/bin"}) == []


def test_a_node_whose_nvidia_smi_gives_no_answer_is_a_bad_one(
        bound: tuple[RunDir, Path], stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.add("nvidia-smi", "exec sleep 60")
    assert prepare.visible_gpus({"PATH": f"{stubs.folder}:/usr/bin:/bin"}, 0.5) is None
    monkeypatch.setattr(prepare, "visible_gpus", lambda _: None)
    run, root = bound
    facts = prepare.node_facts(read_record(run.plan, Plan), root)
    assert facts.health.faults == ("nvidia-smi gives no answer within 60 s",)
    assert facts.gpus == []


@pytest.mark.parametrize(("smi", "given", "fault"), [
    (f"cat <<'EOF'\n{GPUS}EOF", "0,1,2,3", "nvidia-smi shows 2 of the 4 GPUs of this job (0,1,2,3)"),
    ("echo 'Unable to determine the device handle'; exit 9", "0", "nvidia-smi shows 0 of the 1 GPUs of this job (0)"),
    (f"cat <<'EOF'\n{GPUS}EOF", "0,1", None), ("exit 9", "MIG-0123", None), ("exit 9", "", None),
])
def test_a_node_that_lacks_a_gpu_of_the_job_is_a_bad_one(bound: tuple[RunDir, Path], stubs: Stubs, smi: str, given: str,
                                                        fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.add("nvidia-smi", smi)
    monkeypatch.setattr(health, "check", lambda uuids, env: Health())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    run, root = bound
    assert prepare.node_facts(read_record(run.plan, Plan), root).health.faults == ((fault,) if fault else ())


def test_a_node_that_cannot_be_prepared_says_so_before_its_job_ends(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prepare", str(run.path)])
    run.slots.mkdir()
    with pytest.raises(OSError, match="directory"):
        prepare.main()
    last = run.read_events()[-1]
    assert last.event == "failed"
    assert "could not be prepared" in str(last.reason)


def test_a_run_has_one_engine_however_often_its_script_is_sent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prepare", str(run.path)])
    prepare.main()
    before = run.key.read_text(), run.read_events()
    with pytest.raises(SystemExit) as end:
        prepare.main()
    assert str(end.value.code).startswith(f"error: {run.run_id}: was started before")
    assert (run.key.read_text(), run.read_events()) == before
    run.record("serve", "resent", reason="its node is bad", job_id="201")
    prepare.main()
    assert run.key.read_text() != before[0]


def test_a_run_that_was_cancelled_before_its_turn_is_not_prepared(
        run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record("cancel", "cancelled", reason="cancelled on request")
    monkeypatch.setattr("sys.argv", ["prepare", str(run.path)])
    with pytest.raises(ServeError, match="the run was cancelled before it started"):
        prepare.main()
    assert not run.slots.exists()
    assert not run.key.exists()
    assert [event.event for event in run.read_events(["serve"])] == ["started", "failed"]
