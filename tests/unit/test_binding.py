"""Binding: every rank gets the cores and memory beside its GPU, and the API servers cores that no rank uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isambard_serve import binding, topology
from isambard_serve.binding import Binding
from isambard_serve.topology import Topology
from tests.unit import machines


def on(machine: Callable[..., machines.SMI], root: Path, visible: str | None = None, **limits: Any) -> Topology:
    """The topology of a machine."""
    return topology.read(root, machine(root, **limits), visible)


def test_a_whole_quad_gh200_binds_each_rank_to_its_grace_and_all_memory_to_the_graces(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path))
    assert bound == Binding(
        gpu_nodes=(0, 1, 2, 3), gpu_cpus=("0-63", "72-135", "144-207", "216-279"), memory="0-3",
        server_cpus="64-71,136-143,208-215,280-287")
    assert binding.slots(bound) == {
        "membind": ["numactl", "--membind=0-3"],
        "numa_bind": ["--numa-bind", "--numa-bind-nodes", "0", "1", "2", "3",
                      "--numa-bind-cpus", "0-63", "72-135", "144-207", "216-279"]}


def test_half_a_node_is_bound_within_what_the_job_was_given(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path, "0,1", cpus="144-287", mems="2-3,20,28", gpus=(2, 3)))
    assert (bound.gpu_nodes, bound.gpu_cpus) == ((2, 3), ("144-207", "216-279"))
    assert (bound.memory, bound.server_cpus) == ("2-3", "208-215,280-287")


def test_the_order_is_that_of_the_visible_gpus(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path, "GPU-00000039,GPU-00000009"))
    assert bound.gpu_nodes == (3, 0)


def test_gpus_of_one_socket_share_its_cores_and_no_core_is_spared_twice(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.eight_h100, tmp_path))
    assert bound.gpu_nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert set(bound.gpu_cpus) == {"0-55,112-159", "56-111,168-215"}
    assert bound.server_cpus == "160-167,216-223"


def test_where_cores_are_few_none_is_spared(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path, "0", cpus="0-15"))
    assert (bound.gpu_cpus, bound.server_cpus) == (("0-15",), "")


@pytest.mark.parametrize(("machine", "why"), [
    (machines.laptop, "no GPU is visible"), (machines.bare, "no GPU is visible"),
    (machines.h200_vm, "does not say which NUMA node is beside 0000:03:00.0, 0000:04:00.0")])
def test_where_there_is_nothing_to_bind_the_reason_is_said_and_no_slot_holds_a_word(
        tmp_path: Path, machine: Callable[..., machines.SMI], why: str) -> None:
    bound = binding.choose(on(machine, tmp_path))
    assert why in str(bound.not_applicable)
    assert not bound.applied
    assert binding.slots(bound) == {"membind": [], "numa_bind": []}


def test_one_numa_node_needs_no_binding(tmp_path: Path) -> None:
    smi = machines.laptop(tmp_path)
    machines.put(tmp_path, "sys/bus/pci/devices/0000:01:00.0/numa_node", "0")
    bound = binding.choose(topology.read(tmp_path, [*smi, machines.smi(0, "00000000:01:00.0")], None))
    assert "one NUMA node" in str(bound.not_applicable)


def test_a_job_without_a_core_beside_its_gpu_cannot_be_bound_and_that_is_no_matter_of_course(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path, "0", cpus="0-71", gpus=(2,)))
    assert bound.not_applicable is None
    assert bound.impossible == ("the job has no core beside GPU 0029:01:00.0 (NUMA node 2): it may use CPUs 0-71")
    assert binding.slots(bound) == {"membind": [], "numa_bind": []}


def test_a_job_that_may_not_use_the_memory_beside_its_gpu_cannot_be_bound(tmp_path: Path) -> None:
    bound = binding.choose(on(machines.quad_gh200, tmp_path, "1", mems="0"))
    assert "may not use the memory beside GPU 0019:01:00.0 (NUMA node 1): it may use nodes 0" in str(bound.impossible)


def test_remarks_are_made_where_they_matter(tmp_path: Path) -> None:
    grace, sockets, small = (on(machine, tmp_path / machine.__name__) for machine in (
        machines.quad_gh200, machines.eight_h100, machines.laptop))
    assert [remark.split(":")[0] for remark in binding.remarks(grace)] == ["the kernel's pages are 64 KiB"]
    assert [remark.split(":")[0] for remark in binding.remarks(sockets)] == [
        "the kernel's automatic NUMA balancing is on"]
    assert binding.remarks(msgspec.structs.replace(small, numa_balancing=True)) == []
