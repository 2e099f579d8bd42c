"""Long tables, and the rules by which samples of any format become rows."""

import math
import random

import numpy as np
import pytest
from reading import Read, refusal, with_gaps

from retraind.worker.readers import pivot, samples

SERIES = ("web1", "web2", "web3")
NUM_STAMPS = 60
VALUES = np.random.default_rng(11).normal(size=(NUM_STAMPS, len(SERIES))).round(6)


def records(first=1_700_000_000, step=10, shift=0.0):
    """Series k is late by k times `shift`."""
    return [
        (name, first + step * i + shift * k, VALUES[i, k]) for i in range(NUM_STAMPS) for k, name in enumerate(SERIES)
    ]


def table(rows, header="series,time,value", delimiter=","):
    lines = [header, *(delimiter.join(map(str, row)) for row in rows)]
    return "".join(line + "\n" for line in lines).encode()


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_by_time_and_columns_by_name_whatever_the_order_of_the_file(tmp_path, seed):
    shuffled = random.Random(seed).sample(records(), NUM_STAMPS * len(SERIES))
    read = Read(tmp_path, table(shuffled))
    assert read.format == "csv-long"
    assert read.names == list(SERIES)
    assert read.dropped == {}
    np.testing.assert_array_equal(read.rows, VALUES)


@pytest.mark.parametrize(
    ("header", "order"),
    [("Metric,Timestamp,Value", (0, 1, 2)), ("value,epoch,id", (2, 1, 0)), (" time , name , VALUE ", (1, 0, 2))],
)
def test_a_long_table_is_known_by_its_header_alone(tmp_path, header, order):
    rows = [tuple(record[i] for i in order) for record in records()]
    np.testing.assert_array_equal(Read(tmp_path, table(rows, header)).rows, VALUES)


def test_marks_quotes_null_and_zones_of_dashboards_are_understood(tmp_path):
    head = b'\xef\xbb\xbf"Series";"Time";"Value"\n'
    lines = [
        f'"{name}";"2026-01-01T{i // 3600 + shift:02d}:{i // 60 % 60:02d}:{i % 60:02d}+0{shift}:00";{value}'
        for i in range(0, 100, 10)
        for name, shift, value in (("a", 1, "null" if i == 50 else f"{i},5"), ("b", 2, i))
    ]
    read = Read(tmp_path, head + "\r\n".join(lines).encode())  # no line end after the last one
    np.testing.assert_array_equal(read.rows, with_gaps([[i + 0.5, i] for i in range(0, 100, 10)], (5, 0)))


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (table([(i, i, i % 7) for i in range(20)], "id,time,value"), ["id", "value"]),  # numbers of rows, no series
        (table([("x", i, i, 3) for i in range(20)], "name,time,value,load"), ["value", "load"]),
        (table([("x", i) for i in range(20)], "name,value"), ["value"]),
        (table([(i, i) for i in range(20)], "time,value"), ["value"]),
        (table([("x", i, i) for i in range(20)], "host,time,value"), ["value"]),
        (table([("x", "y", i, i) for i in range(20)], "name,series,time,value"), ["value"]),
    ],
)
def test_what_is_not_clearly_long_is_wide(tmp_path, data, names):
    read = Read(tmp_path, data)
    assert read.format == "csv"
    assert read.names == names


@pytest.mark.parametrize("header", ["host,time,value", "container_ip,timestamp_anon,value", "pod.name,ts,value"])
def test_samples_of_several_owners_in_turn_are_a_series_each(tmp_path, header):
    read = Read(tmp_path, table(records(), header))
    assert (read.format, read.names) == ("csv-long", list(SERIES))
    np.testing.assert_array_equal(read.rows, VALUES)


def test_a_text_that_is_no_owner_makes_no_series(tmp_path):
    read = Read(tmp_path, table(records(), "state,time,value"))
    assert (read.format, read.names) == ("csv", ["value"])


def test_a_column_of_text_beside_series_time_and_value_is_refused(tmp_path):
    error = refusal(tmp_path, table([("cpu", i, i, f"web{i % 2}") for i in range(20)], "metric,time,value,host"))
    assert (error.code, error.line, error.column) == ("ambiguous_columns", 1, 4)
    assert "'host'" in error.message


@pytest.mark.parametrize(
    ("shift", "num_rows"),
    [(0, NUM_STAMPS), (0.3, NUM_STAMPS), (2.4, NUM_STAMPS), (2.5, 2 * NUM_STAMPS), (4, NUM_STAMPS * 3 // 2)],
)
def test_stamps_less_than_half_a_step_apart_are_one_row(tmp_path, shift, num_rows):
    read = Read(tmp_path, table(records(shift=shift)))
    assert len(read.rows) == num_rows
    assert read.num_gaps == (num_rows - NUM_STAMPS) * len(SERIES)
    if num_rows == NUM_STAMPS:
        np.testing.assert_array_equal(read.rows, VALUES)
        assert read.dropped == {}


def test_a_row_never_takes_two_samples_of_one_series(tmp_path):
    rows = [*records(), ("web1", 1_700_000_000 + 10 * 20 + 1, 5.0)]
    read = Read(tmp_path, table(rows))
    # The one that is too many is a row of its own.
    np.testing.assert_array_equal(read.rows, np.insert(VALUES, 21, [5.0, np.nan, np.nan], axis=0))


def test_nothing_is_filled(tmp_path):
    rows = [record for record in records() if record[:2] != ("web2", 1_700_000_050)]
    read = Read(tmp_path, table(rows))
    np.testing.assert_array_equal(read.rows, with_gaps(VALUES, (5, 1)))


def test_the_same_sample_again_counts_once(tmp_path):
    rows = records()
    nothing = [(name, time, "null") for name, time, _ in rows[:9]]
    read = Read(tmp_path, table([*nothing, *rows, *rows[:50], *nothing]))
    np.testing.assert_array_equal(read.rows, VALUES)


def test_two_values_of_one_series_at_one_time_are_refused(tmp_path):
    error = refusal(tmp_path, table([*records(), ("web2", 1_700_000_000, "7.25")]))
    assert (error.code, error.line) == ("malformed", 3 * NUM_STAMPS + 2)
    assert "web2" in error.message
    assert "7.25" in error.message


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        (("web1", "yesterday", 1), 2, "no time stamp"),
        (("web1", "12/31/2025 10:00", 1), 2, "no time stamp"),
        (("web1", "2026-13-01T00:00:00Z", 1), 2, "no time stamp"),
        (("web1", "2026-01-01T00:00:00Z", 1), 2, "dates with a zone"),
        (("web1", 1_700_000_000_000, 1), 2, "milliseconds"),
        (("web1", "1e400", 1), 2, "out of range"),
        (("web1", "9" * 30, 1), 2, "out of range"),
        (("", 1_700_000_000, 1), 1, "no name"),
        (("web1", 1_700_000_000), None, "2 fields"),
        (("web1", 1_700_000_000, 1, 2), None, "4 fields"),
        (("web1", 1_700_000_001, "up"), None, "number in one place and text in another"),
    ],
)
def test_what_can_not_be_put_on_a_row_is_refused_with_its_place(tmp_path, row, column, words):
    error = refusal(tmp_path, table([*records(), row, *records(first=1_800_000_000)]))
    assert (error.code, error.line, error.column) == ("malformed", 3 * NUM_STAMPS + 2, column)
    assert words in error.message
    assert error.remedy


def test_a_record_that_was_cut_is_left_out(tmp_path):
    read = Read(tmp_path, table(records()) + b"web1,17000")
    np.testing.assert_array_equal(read.rows, VALUES)


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_the_magnitude_of_a_time_stamp_tells_its_unit(tmp_path, unit):
    rows = [(name, int(time * unit), value) for name, time, value in records(shift=2)]
    read = Read(tmp_path, table(rows))
    np.testing.assert_array_equal(read.rows, VALUES)


def test_series_without_numbers_are_listed_and_not_used(tmp_path):
    extra = [(name, 1_700_000_000, text) for name, text in (("state", "up"), ("gone", "null"))]
    read = Read(tmp_path, table([*records(), *extra]))
    assert read.ignored == {"state": "not_numeric", "gone": "empty"}
    np.testing.assert_array_equal(read.rows, VALUES)


def test_infinity_is_a_missing_cell(tmp_path):
    rows = records()
    rows[10] = (rows[10][0], rows[10][1], "-inf")
    read = Read(tmp_path, table(rows))
    assert (read.dropped, read.num_non_finite) == ({}, 1)
    np.testing.assert_array_equal(read.rows, with_gaps(VALUES, (3, 1)))


def test_memory_is_bounded_by_the_number_of_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MAX_SAMPLES", 100)
    error = refusal(tmp_path, table(records()))
    assert (error.code, error.line) == ("too_large", 102)
    assert "100 samples" in error.message


def test_memory_is_bounded_by_the_number_of_series(tmp_path):
    error = refusal(tmp_path, table([(f"s{i}", i, i) for i in range(100)]), max_columns=50)
    assert error.code == "too_many_columns"


def test_names_that_differ_by_case_only_are_refused(tmp_path):
    error = refusal(tmp_path, table([*records(), ("WEB1", 1_700_000_000, 1)]))
    assert error.code == "ambiguous_columns"


@pytest.mark.parametrize("block_cells", [1, 7, 50])
def test_rows_do_not_depend_on_where_blocks_end(tmp_path, monkeypatch, block_cells):
    whole = Read(tmp_path, table(records(shift=1)[:-1]))
    monkeypatch.setattr(pivot, "BLOCK_CELLS", block_cells)
    read = Read(tmp_path, table(records(shift=1)[:-1]))
    assert len(read.blocks) > 1
    assert read.problems == whole.problems
    np.testing.assert_array_equal(read.rows, whole.rows)


def test_random_jitter_and_gaps_never_mix_rows(tmp_path):
    """Against a table that is made the slow way: each sample belongs to the tick that it was made for."""
    rng = random.Random(4)
    rows, expected = [], {}
    for tick in range(300):
        for name in SERIES:
            if rng.random() < 0.95:
                rows.append((name, 1_700_000_000_000 + tick * 15_000 + rng.randrange(7000), rng.random()))
                expected.setdefault(tick, {})[name] = rows[-1][2]
    rng.shuffle(rows)
    read = Read(tmp_path, table(rows))
    whole = [[cells.get(name, math.nan) for name in SERIES] for _, cells in sorted(expected.items())]
    np.testing.assert_array_equal(read.rows, whole)
    assert read.dropped == {}
