"""JSON documents that are held whole: arrays of objects, and the reports of sadf."""

import json

import numpy as np
import pytest
from reading import Read, refusal

from retraind.worker.readers import document

OBJECTS = [{"ts": f"2026-01-01T00:00:{i:02d}Z", "m0": i / 7, "m1": i, "s": 'a\n"]\\ b'} for i in range(60)]
ROWS = np.array([[o["m0"], o["m1"]] for o in OBJECTS])


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array_of_objects_is_what_json_lines_are(tmp_path, indent):
    read = Read(tmp_path, b"\xef\xbb\xbf\n" + json.dumps(OBJECTS, indent=indent).encode() + b"\r\n")
    assert read.format == "json"
    assert read.names == ["m0", "m1"]
    assert read.ignored == {"ts": "not_numeric", "s": "not_numeric"}
    np.testing.assert_array_equal(read.rows, ROWS)


def test_what_is_no_object_is_counted_with_its_number(tmp_path):
    elements = [*OBJECTS[:3], {"m0": None}, 7, *OBJECTS[3:]]
    read = Read(tmp_path, json.dumps(elements, indent=1).encode())
    assert read.dropped == {"missing": 1, "malformed": 1}
    assert [problem[0] for problem in read.problems] == [4, 5]
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize(
    ("data", "code", "place"),
    [
        (b"[]", "no_rows", (None, None)),
        (b"[[1, 2], [3, 4]]", "malformed", (1, None)),
        (b'[{"a": 1},\n {"a": 2}', "truncated", (None, None)),
        (b'[{"a": 1},\n {"a": 2},,\n]', "malformed", (2, 11)),
        (b'[{"a": 1},\n {"a": NaN}]', "malformed", (2, 8)),
        (b'[{"a": 1}]\n[{"a": 1}]', "malformed", (2, 2)),
        (b"[" * 100_000, "malformed", (None, None)),
    ],
)
def test_what_is_no_array_of_objects_is_refused(tmp_path, data, code, place):
    error = refusal(tmp_path, data)
    assert error.code == code
    assert (error.line, error.column) == place
    assert error.remedy


def test_a_document_that_is_too_large_to_be_held_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 5000)
    error = refusal(tmp_path, json.dumps(OBJECTS).encode())
    assert error.code == "too_large"
    assert "jq -c" in error.remedy


def entry(i, cpus=("all", "0"), **more):
    return {
        "timestamp": {"date": "2026-01-01", "time": f"10:{i:02d}:00", "tz": "UTC", "interval": 60},
        "cpu-load": [{"cpu": cpu, "usr": i + k / 2, "idle": 50} for k, cpu in enumerate(cpus)],
        "queue": {"runq-sz": i},
        "network": {"net-dev": [{"iface": "eth0", "rxkB": -i}]},
        "power-management": {
            "battery": [{"number": 0, "percent-capacity": 90, "status": "Full"}],
            "usb-devices": [{"bus_number": 1, "maxpower": 2}, {"bus_number": 1, "maxpower": 100}],
        },
    } | more


def report(entries, num_hosts=1):
    host = {"nodename": "web1", "number-of-cpus": 1, "statistics": entries, "restarts": []}
    return json.dumps({"sysstat": {"hosts": [host] * num_hosts}}, indent=1).encode()


def test_an_entry_of_sadf_is_a_row_with_paths_as_names(tmp_path):
    read = Read(tmp_path, report([entry(i) for i in range(9)]))
    assert read.format == "sadf"
    assert read.names == [
        "cpu-load.0.idle",
        "cpu-load.0.usr",
        "cpu-load.all.idle",
        "cpu-load.all.usr",
        "network.net-dev.eth0.rxkB",
        "power-management.battery.0.percent-capacity",
        "queue.runq-sz",
    ]
    not_used = ("power-management.battery.0.status", "power-management.usb-devices")
    assert read.ignored == dict.fromkeys(not_used, "not_numeric")
    assert read.rows.tolist() == [[50, i + 0.5, 50, i, -i, 90, i] for i in range(9)]


def test_a_cpu_that_comes_later_is_a_missing_cell_before(tmp_path):
    read = Read(tmp_path, report([entry(0), *(entry(i, cpus=("all", "0", "1")) for i in range(1, 9))]))
    assert read.rows.shape == (9, 9)
    later = [read.names.index(f"cpu-load.1.{name}") for name in ("idle", "usr")]
    assert sorted(zip(*map(list, np.nonzero(np.isnan(read.rows))), strict=True)) == [(0, index) for index in later]


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (report([entry(0), entry(1)], num_hosts=2), "malformed", "2 hosts"),
        (report([]), "no_rows", "no sample"),
        (report([entry(0), entry(0) | {"queue": {"runq-sz": 7}}]), "malformed", "two values"),
        (report([entry(0, cpus=("all", "0", "0"))]), "malformed", "twice"),
        (report([entry(0, disk=[1, 2])]), "malformed", "without a name"),
        (report([entry(0, timestamp={"date": "01/02/26", "time": "10 AM"})]), "malformed", "entry 0"),
        (report([entry(0, timestamp={})]), "malformed", "entry 0"),
        (report([7]), "malformed", "entry 0"),
        (b'{"sysstat": {"hosts": 7}}', "malformed", "array"),
        (report([entry(0), entry(1)])[:-30], "truncated", "too early"),
    ],
)
def test_a_report_that_can_not_be_used_is_refused(tmp_path, data, code, words):
    error = refusal(tmp_path, data)
    assert error.code == code
    assert words in error.message
    assert error.remedy
