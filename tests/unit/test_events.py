"""The wire from worker to service: every kind round trip, frozen bytes, and what a reader does with the rest."""

import json
from pathlib import Path

import pytest
from builders import JOB_ID, make_dataset, make_events

from retraind import events
from retraind.config import DataConfig
from retraind.events import Event, ProtocolError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "events.jsonl"
EVENTS = make_events()


def encode(event: Event, seq: int = 1) -> bytes:
    return events.encode(event, job=JOB_ID, attempt=2, seq=seq, t=1_764_543_132.25)


def altered(**changes: object) -> bytes:
    """A good line with some of its envelope changed."""
    return json.dumps({**json.loads(encode(EVENTS[1])), **changes}).encode()


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(event) for event in EVENTS} == set(events.KINDS.values()) == set(Event.__subclasses__())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_out_as_it_went_in(event: Event) -> None:
    envelope, found = events.decode(encode(event, seq=7))
    assert found == event
    assert (envelope.v, envelope.job, envelope.attempt, envelope.seq, envelope.t) == (1, JOB_ID, 2, 7, 1_764_543_132.25)
    assert events.KINDS[envelope.kind] is type(event)


def test_the_bytes_on_the_wire_are_frozen() -> None:
    """A running service and the worker of the version before must understand each other: the file never changes."""
    lines = GOLDEN.read_bytes().splitlines(keepends=True)
    assert lines == [encode(event, seq) for seq, event in enumerate(EVENTS, 1)]
    assert [events.decode(line)[1] for line in lines] == EVENTS


@pytest.mark.parametrize("event", [events.Heartbeat(), events.Progress(
    epoch=1, epochs=5, loss=None, rows_per_second=0.0, seconds_left=0.0, device="cpu"
), events.Failed(code="terminated", message="stopped")])  # fmt: skip
def test_what_is_not_known_yet_may_be_left_open(event: Event) -> None:
    assert events.decode(encode(event))[1] == event


def test_a_message_with_line_ends_stays_on_one_line() -> None:
    event = events.Failed(code="malformed", message="a\nb\r\n\u2028\x00", remedy="\n")
    line = encode(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert events.decode(line)[1] == event


@pytest.mark.parametrize("changes", [{"kind": "news-from-the-future"}, {"v": 2}, {"v": 0}, {"kind": ""}])
def test_an_unknown_kind_or_version_is_an_envelope_without_an_event(changes: dict[str, object]) -> None:
    envelope, event = events.decode(altered(**changes, body={"anything": [1, 2]}))
    assert envelope.job == JOB_ID
    assert event is None


def test_fields_that_a_newer_worker_adds_are_ignored() -> None:
    line = altered(mood="good", body={"kind": "stage", "name": "ingest", "number": 2})
    assert events.decode(line)[1] == events.Stage(name="ingest")


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"null", b"[]", b"3", b"this is not an event\n", b'{"v":1', b"\xff\xfe", b"\x00" * 100,
        b"[" * 100_000,
        b'{"v":1,"job":"x","attempt":1,"seq":1,"t":1.0,"kind":"stage"}',
        altered(attempt="one"),
        altered(body={"kind": "stage"}),
        altered(body={"kind": "stage", "name": 3}),
        altered(body={"kind": "hello", "name": "ingest"}),
        altered(body=[]),
        altered(kind="hello"),
    ],
    ids=lambda line: repr(line[:40]),
)  # fmt: skip
def test_a_line_that_is_no_event_is_a_breach_of_the_protocol(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an event"):
        events.decode(line)


def test_a_breach_is_told_without_repeating_all_of_it() -> None:
    with pytest.raises(ProtocolError) as caught:
        events.decode(b"x" * 100_000)
    assert len(str(caught.value)) < 1000


def test_the_longest_report_of_a_dataset_fits_into_a_line() -> None:
    """A header of the longest line that is read by default, every column of it constant and so named twice."""
    limits = DataConfig()
    names = [f"{number:0{limits.max_line_bytes // limits.max_columns - 1}d}" for number in range(limits.max_columns)]
    line = encode(events.Ingested(dataset=make_dataset(metric_names=names, constant_metrics=names)))
    assert len(line) <= events.MAX_LINE_BYTES
