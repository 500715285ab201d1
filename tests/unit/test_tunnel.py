"""What a tunnel can lead to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from isambard_serve import records, tunnel
from isambard_serve.errors import HostError, UsageError
from isambard_serve.host import Done, Host
from isambard_serve.records import Endpoint
from tests.unit.helpers import some_run

ENDPOINT = msgspec.json.encode(Endpoint(url="http://10.0.0.1:4711", model="m", node="nid001", job_id="101",
                                        key_file="/shared/key"))


class LoginNode:
    """Answers `status` with one run, and `cat` with files."""

    name = "there"

    def __init__(self, files: dict[str, bytes], **run: Any) -> None:
        self._files = files
        self._run = some_run(**run)

    def run(self, argv: list[str], **_: Any) -> Done:
        """Answer."""
        if argv[0] == "cat":
            content = self._files.get(argv[1])
            return Done(returncode=0 if content else 1, stdout=content or b"", stderr=b"")
        return Done(returncode=0, stdout=records.document("status", runs=[msgspec.to_builtins(self._run)]), stderr=b"")


def find(files: dict[str, bytes] | None = None, **run: Any) -> tunnel.Target:
    files = {"/shared/runs/x/endpoint.json": ENDPOINT, "/shared/key": b"secret\n"} if files is None else files
    there: Host = LoginNode(files, **{"state": "ready", **run})  # type: ignore[assignment]
    return tunnel.find(there, "101", "1")


def test_a_server_for_people_is_led_to_where_it_listens() -> None:
    found = find(url="http://10.0.0.1:4711")
    assert (found.address, found.port, found.model, found.key) == ("10.0.0.1", 4711, "m", "secret")


@pytest.mark.parametrize("url", ["http://127.0.0.1:4711", "http://localhost:4711", "http://[::1]:4711"])
def test_loopback_of_a_compute_node_is_not_the_login_nodes(url: str) -> None:
    with pytest.raises(UsageError, match="no login node reaches") as caught:
        find(url=url)
    assert "interface" in str(caught.value.remedy)


def test_loopback_of_a_site_without_slurm_is_the_hosts_own() -> None:
    assert find(url="http://127.0.0.1:4711", jobs={"serve": "local-1-2"}).address == "127.0.0.1"


def test_a_key_that_cannot_be_read_is_named() -> None:
    with pytest.raises(HostError, match="/shared/key"):
        find({"/shared/runs/x/endpoint.json": ENDPOINT}, url="http://10.0.0.1:4711")


def test_an_answer_that_is_no_document_is_the_hosts_fault() -> None:
    there = LoginNode({})
    there.run = lambda argv, **_: Done(returncode=0, stdout=b"{} and more", stderr=b"")  # type: ignore[method-assign]
    with pytest.raises(HostError, match="there: its answer cannot be understood"):
        tunnel.status(there, "101", "1", None)  # type: ignore[arg-type]
