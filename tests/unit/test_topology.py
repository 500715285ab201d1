"""Topology: each kind of machine is read for what it is, and what it does not say is not made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from isambard_serve import topology
from isambard_serve.topology import NumaNode
from tests.unit import machines


def test_on_a_quad_gh200_each_gpu_is_beside_a_grace_and_the_nodes_of_memory_alone_are_hbm(tmp_path: Path) -> None:
    found = topology.read(tmp_path, machines.quad_gh200(tmp_path), None)
    assert [(gpu.pci, gpu.node) for gpu in found.gpus] == [
        ("0009:01:00.0", 0), ("0019:01:00.0", 1), ("0029:01:00.0", 2), ("0039:01:00.0", 3)]
    assert {node: topology.ranges(cpus) for node, cpus in found.cpu_nodes.items()} == {
        0: "0-71", 1: "72-143", 2: "144-215", 3: "216-287"}
    assert found.hbm == {4, 12, 20, 28}
    assert found.nodes[0] == NumaNode(node=0, cpus="0-71", memory_gib=120.0)
    assert (found.page_kib, found.numa_balancing) == (64, False)


def test_a_job_with_a_part_of_the_node_sees_its_gpus_cores_and_memory_alone(tmp_path: Path) -> None:
    smi = machines.quad_gh200(tmp_path, cpus="144-287", mems="2-3,20,28", gpus=(2, 3))
    found = topology.read(tmp_path, smi, "0,1")
    assert [gpu.node for gpu in found.gpus] == [2, 3]
    assert (found.cpus_allowed, found.mems_allowed) == ("144-287", "2-3,20,28")


def test_of_two_sockets_each_has_four_gpus_and_no_memory_is_alone(tmp_path: Path) -> None:
    found = topology.read(tmp_path, machines.eight_h100(tmp_path), None)
    assert [gpu.node for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.gpus[5].pci == "0000:c3:00.0"
    assert found.hbm == frozenset()
    assert found.numa_balancing is True


@pytest.mark.parametrize("text", ["", "N/A", "0-", "-1", "0-3,", "a", "0 1", "0x1", "0-4000000000", "\0"])
def test_what_is_no_list_of_numbers_holds_none(text: str) -> None:
    assert topology.numbers(text) == frozenset()


@pytest.mark.parametrize("text", ["", "KernelPageSize:\n", "KernelPageSize: x kB\n", "\xff"])
def test_a_machine_whose_files_make_no_sense_is_one_that_says_nothing(tmp_path: Path, text: str) -> None:
    smi = machines.quad_gh200(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_text(text, encoding="latin-1")
    found = topology.read(tmp_path, smi, None)
    assert {gpu.node for gpu in found.gpus} == {None}
    assert found.page_kib is None


def test_a_virtual_machine_that_does_not_say_where_its_gpus_are_is_not_second_guessed(tmp_path: Path) -> None:
    found = topology.read(tmp_path, machines.h200_vm(tmp_path), None)
    assert [gpu.node for gpu in found.gpus] == [None, None]


def test_a_gpu_whose_own_node_has_no_cpus_is_beside_those_that_its_cpu_list_names(tmp_path: Path) -> None:
    smi = machines.quad_gh200(tmp_path)
    machines.put(tmp_path, "sys/bus/pci/devices/0019:01:00.0/numa_node", "12")
    assert topology.read(tmp_path, smi, "1").gpus[0].node == 1


def test_a_machine_without_gpus_or_without_numa_has_none(tmp_path: Path) -> None:
    small = topology.read(tmp_path / "laptop", machines.laptop(tmp_path / "laptop"), None)
    assert (small.gpus, [node.node for node in small.nodes]) == ((), [0])
    plain = topology.read(tmp_path / "bare", machines.bare(tmp_path / "bare"), None)
    assert (plain.gpus, plain.nodes, plain.numa_balancing) == ((), (), None)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    found = topology.read(tmp_path, [{"index": "0", "uuid": "GPU-a", "pci.bus_id": "[N/A]"}], None)
    assert (found.gpus[0].pci, found.gpus[0].node) == ("", None)
    assert (found.nodes, found.cpus_allowed, found.page_kib) == ((), "", None)


def test_this_machine_can_be_read() -> None:
    found = topology.read(Path("/"), [], None)
    assert topology.numbers(found.cpus_allowed)
    assert found.page_kib is not None


@pytest.mark.parametrize(("visible", "seen"), [
    (None, "0123"), ("0,1,2,3", "0123"), ("3,1", "31"), ("", ""), ("-1", ""), ("NoDevFiles", ""), ("0,7,1", "0"),
    ("GPU-000000290100.0", "2"), (" GPU-00000039, 0", "30"), ("GPU-000000", ""), ("GPU-0", ""), ("MIG-1a2b", ""),
])
def test_the_visible_gpus_are_those_that_cuda_shows_in_its_order(
        tmp_path: Path, visible: str | None, seen: str) -> None:
    smi = machines.quad_gh200(tmp_path)
    assert "".join(gpu["index"] for gpu in topology.visible_gpus(smi, visible)) == seen


@pytest.mark.parametrize(("written", "held"), [
    ("", []), ("0", [0]), ("0-3,8\n", [0, 1, 2, 3, 8]), ("8,0-1", [0, 1, 8])])
def test_a_list_of_cpus_is_read_and_written_as_linux_does(written: str, held: list[int]) -> None:
    assert sorted(topology.numbers(written)) == held
    assert topology.numbers(topology.ranges(held)) == set(held)


def test_ranges_are_as_short_as_they_can_be() -> None:
    assert topology.ranges([5, 1, 2, 3, 9, 8]) == "1-3,5,8-9"
    assert topology.ranges([]) == ""


@pytest.mark.parametrize(("bus_id", "address"), [
    ("00000009:01:00.0", "0009:01:00.0"), ("00000000:C3:00.0", "0000:c3:00.0"), ("00010000:e1:00.0", "10000:e1:00.0"),
    ("[N/A]", None), ("", None)])
def test_a_pci_address_is_written_as_sysfs_names_its_folders(bus_id: str, address: str | None) -> None:
    assert topology.sysfs_address(bus_id) == address
