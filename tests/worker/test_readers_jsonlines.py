"""JSON lines: alignment by key, and what JSON leaves open."""

import json
import random
import struct

import numpy as np
import pytest
from reading import Read, refusal

from retraind.worker.readers import jsonlines

OBJECTS = [{"ts": f"2026-01-01T00:00:{i:02d}Z", "m0": i / 7, "m1": i, "m2": -i * 1e9} for i in range(60)]
ROWS = np.array([[o["m0"], o["m1"], o["m2"]] for o in OBJECTS])
LINES = [json.dumps(o) for o in OBJECTS]


def text(lines):
    return "".join(line + "\n" for line in lines).encode()


def test_rows_align_by_key_whatever_the_order(tmp_path):
    rng = random.Random(1)
    lines = [json.dumps(dict(rng.sample(list(o.items()), 4))) for o in OBJECTS]
    read = Read(tmp_path, text([LINES[0], *lines[1:]]))
    assert read.format == "jsonl"
    assert read.names == ["m0", "m1", "m2"]
    assert read.ignored == {"ts": "not_numeric"}
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbf" + text(LINES), text(LINES)[:-1], b"\n \n" + b"\r\n\n".join(text(LINES).splitlines())]
)
def test_marks_and_blank_lines_are_no_rows(tmp_path, data):
    read = Read(tmp_path, data)
    assert read.dropped == {}
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize(
    ("line", "num_non_finite"),
    [
        ('{"m0": 1, "m2": 3}', 0),
        ('{"m0": 1, "m1": null, "m2": 3}', 0),
        ('{"m0": 1, "m1": NaN, "m2": 3}', 0),
        ('{"m0": 1, "m1": "N/A", "m2": 3}', 0),
        ('{"m0": 1, "m1": Infinity, "m2": 3}', 1),
        ('{"m0": 1, "m1": -Infinity, "m2": 3}', 1),
        ('{"m0": 1, "m1": "inf", "m2": 3}', 1),
        ('{"m0": 1, "m1": 1e400, "m2": 3}', 1),
        ('{"m0": 1, "m1": 1' + "0" * 400 + ', "m2": 3}', 1),
    ],
)
def test_what_is_no_value_is_a_missing_cell(tmp_path, line, num_non_finite):
    lines = [*LINES[:30], line, '{"m1": null, "m2": 1' + "0" * 400 + ', "m0": 5}', *LINES[30:]]
    read = Read(tmp_path, "\n".join(lines).encode() + b"\n")
    assert (read.dropped, read.num_non_finite) == ({}, num_non_finite + 1)
    np.testing.assert_array_equal(read.rows[30:32], [[1, np.nan, 3], [5, np.nan, np.nan]])
    np.testing.assert_array_equal(np.delete(read.rows, [30, 31], axis=0), ROWS)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"other": "x"}', "missing"),
        ('{"m0": null, "m1": "N/A", "m2": NaN}', "missing"),
        ('{"m0": Infinity, "m1": null}', "non_finite"),
        ('{"m0": null, "m1": "2", "m2": 3}', "not_a_number"),
        ('{"m0": 1, "m1": "2", "m2": 3}', "not_a_number"),
        ('{"m0": 1, "m1": true, "m2": 3}', "not_a_number"),
        ('{"m0": 1, "m1": [2], "m2": 3}', "not_a_number"),
        ('{"m0": 1, "m1": {"v": 2}, "m2": 3}', "not_a_number"),
        ('{"m0": 1, "m1": 2, "m2": 3, "m1": 2}', "malformed"),
        ('{"m0" :1, "m1": 2, "m2": 3, "m1": 2}', "malformed"),
        ('{"m0": 1, "m1": 2, "m2": 3, "ts": "a:b", "ts": "c"}', "malformed"),
        ("[1, 2, 3]", "malformed"),
        ("7", "malformed"),
        ("{" * 100_000, "malformed"),
        ('{"m0": 1, "m1": 2, "m2": 3', "malformed"),
        ('{"m0": 01, "m1": 2, "m2": 3}', "malformed"),
        ('{"m0": 1, "m1": 2, "m2": 3} x', "malformed"),
        ('{"m0": "\xff"}', "malformed"),
    ],
)
def test_a_bad_line_is_dropped_with_its_reason(tmp_path, line, reason):
    lines = [*LINES[:30], line, *LINES[30:]]
    read = Read(tmp_path, "\n".join(lines).encode("latin-1") + b"\n")
    assert read.dropped == {reason: 1}
    assert [(p[0], p[2]) for p in read.problems] == [(31, reason)]
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize(
    "line", ['{"ts": "a \\"b\\": c", "m0": 1, "m1": 2, "m2": 3}', '{ "m2":3 ,"m1" : 2, "m0":1 , "x": {"y": [1]} }']
)
def test_a_line_that_only_looks_like_trouble_is_used(tmp_path, line):
    read = Read(tmp_path, text([*LINES, line]))
    assert read.dropped == {}
    assert read.rows[-1].tolist() == [1, 2, 3]


def test_a_cut_last_line_is_counted_as_such(tmp_path):
    read = Read(tmp_path, text(LINES) + b'{"m0": 1.2, "m0')
    assert read.dropped == {"truncated_tail": 1}
    assert read.problems[0][:3] == (61, None, "truncated_tail")
    np.testing.assert_array_equal(read.rows, ROWS)


def test_nested_and_quoted_values_are_no_metrics(tmp_path):
    lines = [json.dumps({"a": i, "n": {"v": i}, "l": [i], "b": True, "s": str(i), "e": None}) for i in range(20)]
    read = Read(tmp_path, text(lines))
    assert read.names == ["a"]
    assert read.ignored == dict.fromkeys("nlbs", "not_numeric") | {"e": "empty"}


def test_keys_that_differ_by_case_only_are_ambiguous(tmp_path):
    assert refusal(tmp_path, text(['{"m5": 1}', '{"M5": 1}'])).code == "ambiguous_columns"


def test_numbers_are_parsed_to_the_nearest_float64(tmp_path):
    rng = random.Random(4)
    values = [2**53 - 1, 2**53 + 1, 2**64 - 1, 10**30]
    values += [v for v in (struct.unpack("<d", rng.randbytes(8))[0] for _ in range(5000)) if abs(v) < 3e38]
    read = Read(tmp_path, text(f'{{"m": {v!r}}}' for v in values))
    assert read.rows[:, 0].tolist() == [float(v) for v in values]


def test_rows_do_not_depend_on_where_blocks_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonlines, "BLOCK_BYTES", 200)
    read = Read(tmp_path, text(LINES))
    assert len(read.blocks) > 10
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{\n"a": {\n"b": 1\n}\n}\n', "malformed"),
        (b'{"a": "x"}\n{"a": "y"}\n', "no_numeric"),
        (b"{}\n{}\n", "malformed"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, data, code):
    error = refusal(tmp_path, data)
    assert error.code == code
    assert error.remedy
