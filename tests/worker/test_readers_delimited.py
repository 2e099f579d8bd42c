"""Delimited text: dialects, headers, strict numbers, dropped rows, and the two paths that must agree."""

import csv
import io
import itertools
import math
import random
import struct

import numpy as np
import pytest
from reading import Read, refusal, with_gaps

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.report import MAX_PROBLEMS
from retraind.worker.readers import delimited, open_reader
from retraind.worker.readers.numbers import reason_against
from retraind.worker.readers.source import Source

NAMES = [f"m{k:02d}" for k in range(32)]
HEADER = ",".join(NAMES)


def row(i, width=32):
    return [f"{math.sin(i * 0.1 + k) * 10 + k:.4f}" for k in range(width)]


def good(num_rows, header=HEADER):
    lines = [header] if header else []
    return lines + [",".join(row(i)) for i in range(num_rows)]


def text(lines, end="\n"):
    return "".join(line + end for line in lines).encode()


GOOD = np.array([[float(cell) for cell in row(i)] for i in range(300)])


def quoted(lines):
    return ['"' + line.replace(",", '","') + '"' for line in lines]


@pytest.mark.parametrize(
    "data",
    [
        text(good(300)),
        text(good(300))[:-1],
        text(good(300), "\r\n"),
        text(good(300), "\r"),
        text(good(300), "\r\r\n"),
        b"\xef\xbb\xbf" + text(good(300), "\r\n") + b"\r\n\r\n\x1a",
        b"\n\n  \n" + text(good(300), "\n\n"),
        text(line.replace(",", ";") for line in good(300)),
        text(line.replace(",", "\t") for line in good(300)),
        text(line.replace(",", "|") for line in good(300)),
        text(line.replace(",", " , ") for line in good(300)),
        text(["sep=;"] + [line.replace(",", ";") for line in good(300)], "\r\n"),
        text(line.replace(",", ";").replace(".", ",") for line in good(300)),
        text(line.replace(",", "\t").replace(".", ",") for line in good(300)),
        text(quoted(good(300))),
        b"\xef\xbb\xbf" + text(quoted(good(300)), "\r\n"),
        text(good(150) + quoted(good(300, header="")[150:])),
    ],
    ids=itertools.count(),
)
def test_the_same_table_is_read_whatever_its_dialect(tmp_path, data):
    read = Read(tmp_path, data)
    assert read.names == NAMES
    assert read.dropped == {}
    np.testing.assert_array_equal(read.rows, GOOD)


STAMPS = {
    "german": lambda i: f"{i % 28 + 1:02d}.01.2026 00:{i % 60:02d}:00",
    "iso": lambda i: f"2026-01-01T00:{i % 60:02d}:00Z",
    "address": lambda i: f"10.0.0.{i % 250}",
    "phrase": lambda i: "one, two",
    "empty": lambda i: "",
}


@pytest.mark.parametrize("num_rows", [2, 20, 150])
@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@pytest.mark.parametrize("texts", [["german"], ["iso", "german"], ["address"], ["phrase"], ["empty"]])
@pytest.mark.parametrize("is_metric_first", [True, False])
def test_a_decimal_comma_is_no_delimiter_beside_text(tmp_path, num_rows, has_header, delimiter, texts, is_metric_first):
    cells = [[STAMPS[kind](i) for kind in texts] for i in range(num_rows)]
    numbers = [f"{i},{i % 10}" for i in range(num_rows)]
    table = [[n, *c] if is_metric_first else [*c, n] for c, n in zip(cells, numbers, strict=True)]
    names = ["load", *texts] if is_metric_first else [*texts, "load"]
    read = Read(tmp_path, text(delimiter.join(row) for row in [*([names] if has_header else []), *table]))
    assert read.rows.tolist() == [[float(n.replace(",", "."))] for n in numbers]
    assert len(read.ignored) == len(texts)


def test_a_comma_file_is_read_as_such_beside_text_with_other_delimiters(tmp_path):
    agent = "probe (X11; Linux x86_64; rv:1.0) | a"
    read = Read(tmp_path, text(["agent,a,b", *(f"{agent},{i},{i}.5" for i in range(50))]))
    assert read.rows.tolist() == [[i, i + 0.5] for i in range(50)]
    headerless = Read(tmp_path, text(f"2026-01-01,x;y,{i},{i}.5" for i in range(50)))
    assert headerless.rows.tolist() == read.rows.tolist()


@pytest.mark.parametrize("block_bytes", [64, 4099, 9001])
@pytest.mark.parametrize("lines", [good(300), quoted(good(300)), [s.replace(",", ";") for s in good(300)]])
def test_rows_do_not_depend_on_where_blocks_end(tmp_path, monkeypatch, block_bytes, lines):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block_bytes)
    read = Read(tmp_path, text(lines), max_line_bytes=1024)
    assert len(read.blocks) > 3
    np.testing.assert_array_equal(read.rows, GOOD)


def test_numbers_are_parsed_to_the_nearest_float64(tmp_path):
    rng = random.Random(3)
    cells = ["9007199254740991", "9007199254740993", "18446744073709551615", "4.9e-324", "0.1", "5e-324", "1" * 30]
    for _ in range(20_000):
        bits = struct.pack("<Q", rng.getrandbits(64))
        if abs(value := struct.unpack("<d", bits)[0]) < 3e38:
            cells.append(repr(value))
        cells.append(f"{rng.uniform(-1e5, 1e5):.{rng.randint(0, 25)}f}")
    read = Read(tmp_path, text(["m", *cells]))
    assert read.rows[:, 0].tolist() == [float(cell) for cell in cells]


MARKERS = ["", " ", "N/A", "NaN", "nan", "null", "NULL", "None", "-", "--", "#DIV/0!", "-1.#IND", "nAn", "#N/A", "-nan"]
INFINITE = ["inf", "-Infinity", "1e400", "-INF", "+inf", "1.#INF", "3.5e38"]
NO_NUMBERS = ["1_000", "٣", "0x1F", "TRUE", "1,5x", "1.2.3", "--1", "1e", "1 2", "+", "e5", "12:30", "1.5f", "\xa01"]
NUMBERS = {
    " 1.5 ": 1.5,
    "1.5e3": 1500.0,
    "+2": 2.0,
    ".5": 0.5,
    "5.": 5.0,
    "\t7": 7.0,
    "-0": 0.0,
    "1E-400": 0.0,
    "\v8": 8.0,
    "9\f": 9.0,
}


@pytest.mark.parametrize("wrap", ["{}", '"{}"'])
@pytest.mark.parametrize(
    ("cell", "reason"),
    [(c, "missing") for c in MARKERS]
    + [(c, "non_finite") for c in INFINITE]
    + [(c, "not_a_number") for c in NO_NUMBERS if "," not in c]
    + [(c, None) for c in NUMBERS],
)
def test_a_cell_is_a_number_or_missing_or_its_row_is_dropped(tmp_path, cell, reason, wrap):
    lines = good(200)
    cells = row(99)
    cells[4] = wrap.format(cell)
    lines[100] = ",".join(cells)
    read = Read(tmp_path, text(lines))
    if reason is None:
        assert read.rows[99, 4] == NUMBERS[cell]
        assert read.dropped == {}
        return
    if reason != "not_a_number":
        assert (read.dropped, read.problems) == ({}, [])
        assert (read.num_gaps, read.num_non_finite) == (1, int(reason == "non_finite"))
        np.testing.assert_array_equal(read.rows, with_gaps(GOOD[:200], (99, 4)))
        return
    assert read.dropped == {reason: 1}
    [(line, column, why, shown)] = read.problems
    assert (line, column, why) == (101, 5, reason)
    assert shown.strip() == "" or shown.strip() in cell or shown.startswith("\\")
    np.testing.assert_array_equal(read.rows, np.delete(GOOD[:200], 99, axis=0))


@pytest.mark.parametrize("words", [["TRUE"], ["true", "False"], ["False", ""], ["٣"], ["1_0"]])
def test_a_column_of_words_is_no_numbers_even_where_a_block_holds_nothing_else(tmp_path, monkeypatch, words):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 2048)
    lines = ["up,load"] + [f"{i % 2},{i}" for i in range(2000)] + [f"{words[i % len(words)]},{i}" for i in range(400)]
    read = Read(tmp_path, text(lines), max_line_bytes=1024)
    num_missing = words.count("") * 200
    assert read.dropped == {"not_a_number": 400 - num_missing}
    np.testing.assert_array_equal(read.rows[:2000], [[i % 2, i] for i in range(2000)])
    assert np.isnan(read.rows[2000:, 0]).all()
    assert read.rows[2000:, 1].tolist() == [2 * i + 1 for i in range(num_missing)]


def test_thousands_in_quotes_are_no_number(tmp_path):
    lines = good(200)
    lines[7] = ",".join(['"1,234.5"', *row(6)[1:]])
    read = Read(tmp_path, text(lines))
    assert read.dropped == {"not_a_number": 1}
    assert read.problems == [(8, 1, "not_a_number", "1,234.5")]


def oracle(data):
    """The rule for rows once more, by the csv module and one cell at a time."""
    rows, dropped = [], {}
    for cells in csv.reader(io.StringIO(data)):
        if not cells:
            continue
        reasons = [reason_against(cell) for cell in cells[1:]] if len(cells) == 5 else ["ragged"]
        bad = next((reason for reason in reasons if reason in {"ragged", "not_a_number"}), None)
        if bad:
            dropped[bad] = dropped.get(bad, 0) + 1
        else:
            rows.append([math.nan if reason else float(cell) for cell, reason in zip(cells[1:], reasons, strict=True)])
    return np.array(rows).reshape(-1, 4), dropped


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3])
def test_fast_and_careful_reading_agree_on_dirty_files(tmp_path, monkeypatch, seed, share):
    rng = random.Random(seed)
    dirt = MARKERS + INFINITE + [c for c in NO_NUMBERS if "," not in c] + list(NUMBERS) + ["1,2", '"3"', '"a\nb"', "\n"]
    lines = []
    for i in range(2500):
        cells = [f"host-{i}"] + [f"{rng.gauss(0, 1):.6g}" for _ in range(4)]
        if i > 1000 and rng.random() < share:
            cells[rng.randrange(5)] = rng.choice(dirt)
        lines.append(",".join(cells))
    if seed % 2:
        monkeypatch.setattr(delimited, "BLOCK_BYTES", 50_000)
    body = "\n".join(lines) + "\n"
    read = Read(tmp_path, ("host,a,b,c,d\n" + body).encode(), max_line_bytes=1024)
    rows, dropped = oracle(body)
    np.testing.assert_array_equal(read.rows, rows)
    assert read.dropped == dropped


def test_text_columns_are_left_out_and_quoted_line_ends_belong_to_the_record(tmp_path):
    note = '"fan ""A""\nreplaced, twice"'
    lines = ["ts,host,note," + HEADER]
    lines += [f"2026-01-01T00:{i % 60:02d}:00Z,web-1,{note}," + ",".join(row(i)) for i in range(300)]
    read = Read(tmp_path, text(lines))
    assert read.ignored == {"ts": "not_numeric", "host": "not_numeric", "note": "not_numeric"}
    np.testing.assert_array_equal(read.rows, GOOD)


def test_bytes_that_are_no_utf8_do_no_harm_in_a_column_that_is_not_used(tmp_path):
    lines = [f"{i},Rack \xe4,{i}" for i in range(50)]
    lines[20] = '20,"Rack \xe4",x\xff'
    read = Read(tmp_path, ("a,place,b\n" + "\n".join(lines)).encode("latin-1"))
    assert read.ignored == {"place": "not_numeric"}
    assert len(read.rows) == 49
    assert read.problems == [(22, 3, "not_a_number", "x\\xff")]


@pytest.mark.parametrize("num_rows", [1000, 30_000])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda cells: ['"' + cells[0], *cells[1:]],  # opened at the start of a field
        lambda cells: [*cells[:-1], '"' + cells[-1]],
        lambda cells: [cells[0], '"x"y', *cells[2:]],  # closed in the middle
    ],
)
def test_an_unclosed_quote_is_malformed_at_its_line(tmp_path, num_rows, spoil):
    lines = good(num_rows)
    lines[2] = ",".join(spoil(row(1)))
    error = refusal(tmp_path, text(lines))
    assert (error.code, error.line) == ("malformed", 3)


def test_two_stray_quotes_do_not_swallow_the_rows_between(tmp_path):
    lines = good(1000)
    for i in (2, 500):
        lines[i] = '"' + lines[i]
    error = refusal(tmp_path, text(lines))
    assert (error.code, error.line) == ("malformed", 3)


def test_a_quote_within_a_field_spoils_its_row_only(tmp_path):
    lines = good(300)
    lines[2] = lines[2].replace(",", '",', 1)
    read = Read(tmp_path, text(lines))
    assert read.dropped == {"not_a_number": 1}
    np.testing.assert_array_equal(read.rows, np.delete(GOOD, 1, axis=0))


def test_ragged_rows_are_dropped_with_their_line_and_nothing_shifts(tmp_path):
    lines = good(1000)
    lines[1] += ",7"
    lines[500] = lines[500].rpartition(",")[0]
    read = Read(tmp_path, text(lines))
    assert read.dropped == {"ragged": 2}
    assert [problem[:3] for problem in read.problems] == [(2, None, "ragged"), (501, None, "ragged")]
    assert len(read.rows) == 998
    np.testing.assert_array_equal(read.rows[:299], GOOD[1:])


def test_the_first_problems_are_listed_in_order_of_lines(tmp_path):
    lines = good(300)
    for i in range(1, 101):
        lines[2 * i] = ("1,2", lines[2 * i].replace(".", "x", 1), "," * 31)[i % 3]
    read = Read(tmp_path, text(lines))
    assert sum(read.dropped.values()) == 100
    assert [problem[0] for problem in read.problems] == [2 * i + 1 for i in range(1, MAX_PROBLEMS + 1)]


@pytest.mark.parametrize(
    ("lines", "num_rows", "names"),
    [
        (["1,2", "3,4", "5,6"], 3, ["column_0", "column_1"]),
        (["1,nan", "3,4", "5,6"], 3, ["column_0", "column_1"]),
        (["2024,1e5,nan", "1,2,3", "4,5,6"], 3, ["column_0", "column_1", "column_2"]),
        (["2026-01-01,1,2", "2026-01-02,3,4"], 2, ["column_1", "column_2"]),
        (["web-1,1,2", "web-1,3,4"], 2, ["column_1", "column_2"]),
        (["when,1,2", "2026-01-02,3,4"], 1, ["1", "2"]),
        (["host,load", "web-1,4"], 1, ["load"]),
        ([",a,b", "0,1,2", "1,2,3"], 2, ["column_0", "a", "b"]),
        (["1", "2", "3"], 3, ["column_0"]),
        (["cpu", "2", "3"], 2, ["cpu"]),
        (['"a ""b""" , c '.replace(" ,", ","), "1,2"], 1, ['a "b"', "c"]),
    ],
)
def test_a_header_is_told_from_data_by_its_cells(tmp_path, lines, num_rows, names):
    read = Read(tmp_path, text(lines))
    assert (len(read.rows), read.names) == (num_rows, names)


def test_a_headerless_file_keeps_all_its_rows(tmp_path):
    read = Read(tmp_path, text(good(300, header="")))
    assert read.names == [f"column_{k}" for k in range(32)]
    np.testing.assert_array_equal(read.rows, GOOD)


@pytest.mark.parametrize(
    ("header", "named"),
    [("a,b,a", "a"), ("a,b, a", "a"), ("a,b,A", "A"), ("a,STRASSE,straße", "straße")],
)
def test_names_that_differ_by_case_or_blanks_only_are_ambiguous(tmp_path, header, named):
    error = refusal(tmp_path, text([header, "1,2,3", "4,5,6"]))
    assert error.code == "ambiguous_columns"
    assert named in error.message


def test_times_labels_text_and_empty_columns_are_left_out_with_the_reason(tmp_path):
    header = "Timestamp,epoch,Anomaly,changepoint,host,m08,uptime,m00"
    lines = [header] + [f"{1_700_000_000 + i},{i},0,0,web,,{i},{i * 2}" for i in range(50)]
    read = Read(tmp_path, text(lines))
    assert read.names == ["uptime", "m00"]
    assert read.ignored == {
        "Timestamp": "time",
        "epoch": "time",
        "Anomaly": "label",
        "changepoint": "label",
        "host": "not_numeric",
        "m08": "empty",
    }
    assert read.dropped == {}


def test_a_column_with_a_few_bad_cells_stays_a_metric(tmp_path):
    lines = ["a,b"] + [f"{i},{'error' if i % 10 == 0 else i}" for i in range(100)]
    read = Read(tmp_path, text(lines))
    assert read.names == ["a", "b"]
    assert read.dropped == {"not_a_number": 10}


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"a;b\n1,5;2.5\n", "malformed", 2),
        (b"a;b\n1;2.5\n" + b"1;2\n" * 2000 + b"1,5;3\n", "malformed", 2003),
        (b"a;b\n1;2\n" + b"1,5;2\n" * 2000 + b"1.5;3\n", "malformed", 2003),
        (b"a;b\n" + b"1;2\n" * 2000 + b"1,5;2\n1.5;2\n", "malformed", 2003),
        (b"a;b\n1.234,5;2\n", "malformed", 2),
        (b'a,b\n"1,5","2,5"\n"3,5","4,5"\n', "malformed", 2),
        (b"a,b\n", "no_rows", None),
        (b"a,b", "no_rows", None),
        (b"\n \n\r\n\x1a", "no_rows", None),
        (b'""\n""\n', "no_rows", None),
        (b'a\n""\n', "no_rows", None),
        (b"host,when\nweb,now\n", "no_numeric", None),
        (b"time,label\n1,2\n3,4\n", "no_numeric", None),
        (b"a,b\n1,2,3\n4,5,6\n", "malformed", 2),
        (b"a,b\n1,2\n3,\0004\n", "unsupported_format", None),
        (b"a,b\n" + b"1,2\n" * 5000 + b"3,\0004\n", "malformed", 5002),
        ("température,b\n1,2\n".encode("latin-1"), "encoding", 1),
        ("a,b\n1,2\n".encode("utf-16"), "encoding", 1),
        ("a,b\n1,2\n".encode("utf-16-le"), "encoding", 1),
        (b'"a,b\n1,2\n', "malformed", 1),
    ],
)
def test_what_can_not_be_read_is_refused_with_its_line(tmp_path, data, code, line):
    error = refusal(tmp_path, data)
    assert (error.code, error.line) == (code, line)
    assert error.remedy


def test_the_decimal_mark_may_show_late(tmp_path):
    read = Read(tmp_path, b"a;b\n" + b"1;2\n" * 2000 + b"1,5;2,25\n")
    assert read.rows[-1].tolist() == [1.5, 2.25]
    assert read.dropped == {}


def test_too_many_columns_are_refused(tmp_path):
    wide = text([",".join(f"c{i}" for i in range(5000)), *[",".join("1" * 5000)] * 20])
    assert refusal(tmp_path, wide).code == "too_many_columns"
    assert Read(tmp_path, wide, max_columns=5000).rows.shape == (20, 5000)


def test_a_line_over_the_limit_is_malformed_at_its_line(tmp_path):
    lines = ["a,note"] + [f"{i},x" for i in range(50)]
    lines[30] = "30," + "x" * 5000
    error = refusal(tmp_path, text(lines), max_line_bytes=4096)
    assert (error.code, error.line) == ("malformed", 31)
    assert len(Read(tmp_path, text(lines), max_line_bytes=8192).rows) == 50


def test_an_endless_line_is_refused_without_reading_it_all(tmp_path):
    path = tmp_path / "endless"
    path.write_bytes(b"1,2\n" + b"7" * (40 * 2**20))
    with Source(path, DataConfig()) as source, pytest.raises(DataError) as raised:
        open_reader(source, DataConfig())
    assert (raised.value.code, raised.value.line) == ("malformed", 2)
    assert source.num_bytes < 8 * 2**20


def test_a_quoted_field_beyond_any_reason_is_malformed(tmp_path):
    error = refusal(tmp_path, b'a,b\n1,2\n3,"' + b"x" * 200_000 + b'"\n')
    assert (error.code, error.line) == ("malformed", 3)
