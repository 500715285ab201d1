"""The probe without a GPU: its clockwork against a pretended PyTorch, its readings of the machine, its refusals."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from isambard_serve import hostmemory, kernelcheck, probe, topology
from isambard_serve.ceilings import Gpu
from isambard_serve.errors import HostError
from isambard_serve.probe import Load, Probe, sustain


@dataclass
class Host:
    """The clock of a pretended machine: waiting and launching take time on it."""

    now: float = 0.0

    def monotonic(self) -> float:
        """It."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Lets so much time go by."""
        self.now += seconds


@dataclass
class Chip:
    """A pretended GPU with a queue: it needs ``unit_s`` for a unit of work, four times that for the first ``cold``
    units, and twice that once it is hot. To launch one takes the host ``launch_s``; if it ``blocks``, until it is done.
    """

    host: Host = field(default_factory=Host)
    unit_s: float = 0.01
    cold: int = 0
    hot_after_s: float = float("inf")
    launch_s: float = 0.0
    blocks: bool = False
    done_at: float = 0.0

    def work(self) -> None:
        """Enqueues one unit."""
        begins = max(self.done_at, self.host.now)
        slower = 4 if self.cold > 0 else 2 if begins > self.hot_after_s else 1
        self.cold -= 1
        self.done_at = begins + self.unit_s * slower
        self.host.now = self.done_at if self.blocks else self.host.now + self.launch_s


class Torch:
    """As much of PyTorch as the clockwork uses, with ``chips`` for GPUs."""

    def __init__(self, *chips: Chip) -> None:
        host, current = chips[0].host, [0]

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(chips[current[0]].done_at, host.now)

            def query(self) -> bool:
                return host.now >= self.at

            def elapsed_time(self, other: Event) -> float:
                return 1000 * (other.at - self.at)

        @contextlib.contextmanager
        def device(index: int) -> Iterator[None]:
            before, current[0] = current[0], index
            yield
            current[0] = before

        def synchronize() -> None:
            host.now = max(host.now, chips[current[0]].done_at)

        self.cuda = SimpleNamespace(Event=Event, device=device, synchronize=synchronize, empty_cache=lambda: None)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A pretended machine whose time is everybody's."""
    made = Host()
    monkeypatch.setattr(probe, "time", made)
    return made


def test_a_rate_is_units_over_the_chips_own_time_in_chunks_that_cost_no_time_to_launch(host: Host) -> None:
    chip = Chip(host)
    (course,) = sustain(Torch(chip), [Load(0, chip.work, units=5.0)], seconds=1.0)
    assert course.sustained == pytest.approx(500.0)
    assert course.count * chip.unit_s == pytest.approx(0.05)
    assert len(course.seen) == len(course.events) >= 21


def test_a_chip_that_slows_down_has_a_burst_and_a_lower_rate_that_it_keeps(host: Host) -> None:
    chip = Chip(host, hot_after_s=0.5)
    (course,) = sustain(Torch(chip), [Load(0, chip.work, units=5.0)], seconds=2.0)
    assert course.burst == pytest.approx(500.0)
    assert course.sustained == pytest.approx(250.0)


def test_chips_that_are_measured_at_once_do_not_wait_for_each_other(host: Host) -> None:
    # The first try of each is what its chunks are made after: a slow one makes them small.
    chips = Chip(host), Chip(host, cold=6), Chip(host, unit_s=0.02)
    loads = [Load(index, chip.work, units=5.0) for index, chip in enumerate(chips)]
    courses = sustain(Torch(*chips), loads, seconds=4.0)
    assert [course.count for course in courses] == [5, 1, 2]
    assert [course.sustained for course in courses] == pytest.approx([500.0, 500.0, 250.0])


def test_work_that_the_host_waits_for_has_its_whole_rate(host: Host) -> None:
    chip = Chip(host, blocks=True)      # a copy from memory that is not pinned
    (course,) = sustain(Torch(chip), [Load(0, chip.work, units=5.0)], seconds=1.0)
    assert course.sustained == pytest.approx(500.0)


def test_a_rate_that_changes_while_it_is_taken_says_by_how_much(host: Host) -> None:
    steady = Chip(host, blocks=True)
    assert sustain(Torch(steady), [Load(0, steady.work, units=5.0)], seconds=1.0)[0].spread == pytest.approx(0.0)
    changing = Chip(host, blocks=True, hot_after_s=host.now + 3.0)
    (course,) = sustain(Torch(changing), [Load(0, changing.work, units=5.0)], seconds=4.0)
    assert course.spread == pytest.approx((500 - 250) / course.sustained)


def test_no_chips_burst_begins_with_the_launches_of_another(host: Host) -> None:
    chips = [Chip(host, launch_s=0.001) for _ in range(4)]
    loads = [Load(index, chip.work, units=5.0) for index, chip in enumerate(chips)]
    courses = sustain(Torch(*chips), loads, seconds=1.0)
    assert [course.burst for course in courses] == pytest.approx([courses[0].burst] * 4)


def test_what_fails_is_noted_and_what_is_left_is_measured() -> None:
    gpu = Gpu(index=0, name="chip", uuid="GPU-0", pci="", memory_bytes=1, numa_node=None,
              power_limit_w=None)
    measured = Probe(Torch(Chip()), [gpu], None, seconds=0.0)       # this PyTorch has no tensors at all
    assert measured.matmuls("bf16") == []
    assert measured.copies() == []
    assert measured.peers() == []
    assert [each.what for each in measured.unknown] == ["bf16 matrix products", "copies within a GPU's memory"]


def test_a_machine_without_a_gpu_is_refused_with_the_host_errors_exit_code(
        capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for main in (probe.main, kernelcheck.main):
        assert main(["--out", str(tmp_path / "out.json")]) == HostError.exit_code == 3
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "error: there is no PyTorch here" in captured.err
        assert "→" in captured.err
    without = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", without)
    assert probe.main([]) == 3
    assert "there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_thread_is_bound_to_a_node_and_set_free_again() -> None:
    before = os.sched_getaffinity(0)
    nodes = topology.read(Path("/"), [], None).cpu_nodes
    if not nodes:
        pytest.skip("this kernel shows no NUMA nodes")
    node, cpus = next(iter(nodes.items()))
    with contextlib.suppress(OSError), hostmemory.bound_to(node, cpus):     # a container may forbid it
        assert os.sched_getaffinity(0) <= cpus
    assert os.sched_getaffinity(0) == before


def test_a_node_whose_cpus_are_not_allowed_here_cannot_be_bound_to() -> None:
    with pytest.raises(OSError, match="none of its CPUs"), hostmemory.bound_to(0, {100_000}):
        pass


def test_the_drivers_picture_of_the_links_is_kept_without_its_underlining(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As nvidia-smi 580 prints it, into a pipe too.
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '\\t\\033[4mGPU0\\tGPU1\\033[0m\\n\\nGPU0\\t X \\tNV18\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe._topology() == ("\tGPU0\tGPU1", "GPU0\t X \tNV18")
