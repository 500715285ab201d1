"""The records: their names are promises, and a schema can be made of each."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from isambard_serve import records
from isambard_serve.claim import Holder
from isambard_serve.errors import HostError, NotReadyError, ServeError, UsageError, nearest
from isambard_serve.plan import Plan
from isambard_serve.prepare import NodeFacts
from isambard_serve.recipe import Recipe
from isambard_serve.records import Endpoint, Event, Jobs, Record, Row, Run, Sample, Trace
from isambard_serve.site import Site
from tests.unit.helpers import some_row, some_run, some_sample

KINDS = [Row, Run, Event, Sample, Endpoint, Jobs, Holder, Plan, NodeFacts, Recipe, Site, Trace]


@pytest.mark.parametrize("kind", KINDS)
def test_a_json_schema_can_be_made_of_every_record(kind: type[Record]) -> None:
    schema = msgspec.json.schema(kind)
    assert kind.__name__ in schema["$defs"]
    assert schema["$defs"][kind.__name__]["additionalProperties"] is False
    json.dumps(schema)


def test_a_row_has_the_names_that_were_promised() -> None:
    assert set(Row.__struct_fields__) == {
        "run_id", "recipe", "simulated", "node", "concurrency", "repeat", "output_tok_s", "output_tok_s_per_gpu",
        "total_tok_s", "ratio", "tok_s_per_user", "median_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
        "kv_cache_usage_max", "preemptions", "duration_s", "time_scale", "node_hours", "output_tok_per_node_hour",
        "power_capped", "valid", "reasons", "unknown", "not_applicable", "details", "schema"}


def test_a_run_has_the_names_that_were_promised() -> None:
    assert set(Run.__struct_fields__) >= {
        "run_id", "recipe", "ladder", "site", "simulated", "state", "jobs", "node_hours", "node_hours_by", "schema"}


@pytest.mark.parametrize("record", [some_row(), some_run(), some_sample(time=1)])
def test_a_record_is_read_back_from_its_json_unchanged(record: Record) -> None:
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


@pytest.mark.parametrize("record", [some_row(), some_run()])
def test_a_record_refuses_what_it_does_not_know_and_cannot_be_changed(record: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({**msgspec.to_builtins(record), "new": 1}, type(record))
    with pytest.raises(AttributeError):
        record.run_id = "other"


def test_a_document_carries_its_schema_and_says_null_for_what_is_not_known() -> None:
    text = records.document("status", runs=[some_row(valid=False, output_tok_s=None)])
    read = json.loads(text)
    assert read["schema"] == "isambard-serve/status/1"
    assert read["runs"][0]["output_tok_s"] is None
    assert next(iter(read)) == "schema"


@pytest.mark.parametrize(("kind", "code"), [(ServeError, 1), (UsageError, 2), (HostError, 3), (NotReadyError, 4)])
def test_an_error_says_where_what_and_what_to_do_and_has_its_exit_code(kind: type[ServeError], code: int) -> None:
    error = kind("it broke", where="f.yaml: key", remedy="mend it")
    assert str(error) == "f.yaml: key: it broke\n  → mend it"
    assert str(kind("it broke")) == "it broke"
    assert error.exit_code == code
    assert isinstance(error, ServeError)


def test_only_a_name_that_is_near_is_suggested() -> None:
    assert nearest("max-num-seq", ["max-num-seqs", "model"]) == "did you mean 'max-num-seqs'?"
    assert nearest("qqqq", ["max-num-seqs"]) is None
    assert nearest("x", []) is None
    assert nearest("mine", ["mine", "sandbox"]) is None  # a file that extends its own name
