"""Prometheus: scrapes in text, and answers to range queries."""

import json

import numpy as np
import pytest
from reading import Read, refusal

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.ingest import describe

SCRAPE = """\
# HELP http_requests_total The number, with a \\n and a "quote".
# TYPE http_requests_total counter
http_requests_total{{method="post",code="200"}} {0}
http_requests_total{{ code = "400" , method="post", }}\t{1}

# A comment of no meaning
msdos_file_access{{path="C:\\\\DIR\\\\F.TXT",error="Cannot \\"find\\":\\n}} x"}} 1.458255915e9
metric_without_labels 12.47
go_memory_limit +Inf
quantile_of_nothing{{quantile="0.5",empty=""}} NaN
# TYPE rpc_seconds histogram
rpc_seconds_bucket{{le="0.05"}} {2}
rpc_seconds_bucket{{le="+Inf"}} 144320 # {{trace_id="KOO5S4vxi0o"}} 0.67
rpc_seconds_sum 5.3e-3
rpc_seconds_count 144320
"""
NAMES = [
    "go_memory_limit",
    'http_requests_total{code="200",method="post"}',
    'http_requests_total{code="400",method="post"}',
    "metric_without_labels",
    r'msdos_file_access{error="Cannot \"find\":\n} x",path="C:\\DIR\\F.TXT"}',
    'rpc_seconds_bucket{le="+Inf"}',
    'rpc_seconds_bucket{le="0.05"}',
    "rpc_seconds_count",
    "rpc_seconds_sum",
]


def scrapes(num, end=""):
    finite = SCRAPE.replace("+Inf\nq", "9.2e18\nq")
    return "".join(finite.format(i, i * i, i % 7) + end for i in range(num)).encode()


@pytest.mark.parametrize("end", ["", "# EOF\n"])
def test_a_scrape_is_a_row_and_a_series_a_column(tmp_path, end):
    read = Read(tmp_path, scrapes(30, end))
    assert read.format == "prometheus"
    assert read.names == NAMES
    assert read.ignored == {'quantile_of_nothing{quantile="0.5"}': "empty"}
    steps = np.arange(30)
    expected = [[9.2e18, i, i * i, 12.47, 1.458255915e9, 144320, i % 7, 144320, 5.3e-3] for i in steps.tolist()]
    np.testing.assert_array_equal(read.rows, expected)


@pytest.mark.parametrize("tail", ["\n", "\r\n"])
def test_blank_lines_and_line_ends_do_not_matter(tmp_path, tail):
    read = Read(tmp_path, b"\xef\xbb\xbf\n" + scrapes(5).replace(b"\n", tail.encode()) + b"\n\n")
    assert len(read.rows) == 5


def test_an_infinite_sample_is_a_missing_cell(tmp_path):
    read = Read(tmp_path, scrapes(5) + SCRAPE.format(1, 1, 1).encode())
    assert (len(read.rows), read.dropped, read.num_non_finite) == (6, {}, 1)
    assert [read.names[metric] for metric in np.flatnonzero(np.isnan(read.rows[5]))][:1] == ["go_memory_limit"]


def test_a_series_that_is_not_in_each_scrape_is_a_missing_cell(tmp_path):
    read = Read(tmp_path, b"up 1\nload 2\nup 1\nup 1\nload 3\nnew 7\nup 0\nload 4\nnew 8\n")
    assert read.names == ["load", "new", "up"]
    np.testing.assert_array_equal(read.rows, [[2, np.nan, 1], [np.nan, np.nan, 1], [3, 7, 1], [4, 8, 0]])


def test_scrapes_without_an_end_that_begin_in_different_ways_are_refused(tmp_path):
    error = refusal(tmp_path, b"up 1\nload 2\ntemp 3\nup 1\nload 3\nload 4\ntemp 8\n")
    assert (error.code, error.line) == ("malformed", 6)
    assert "load" in error.message
    assert "# EOF" in error.remedy


def test_scrapes_with_an_end_may_begin_in_different_ways(tmp_path):
    read = Read(tmp_path, b"up 1\nload 2\n# EOF\nload 3\nup 4\n# EOF\n# EOF\nload 5\nup 6\n# EOF")
    assert read.rows.tolist() == [[2, 1], [3, 4], [5, 6]]


@pytest.mark.parametrize(("text", "unit"), [("{}", 1000), ("{}.5", 1)])
def test_time_stamps_put_samples_on_rows_in_any_order(tmp_path, text, unit):
    def stamp(i):
        return text.format((1_700_000_000 + 15 * i) * unit)

    lines = [f'a{{x="1"}} {i} {stamp(i)}' for i in range(20)] + [f"b {-i} {stamp(i)}" for i in reversed(range(20))]
    read = Read(tmp_path, ("\n".join(lines) + "\n# EOF\n").encode())
    assert read.rows.tolist() == [[i, -i] for i in range(20)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up{", "no sample"),
        ('up{a="1" 1', "no sample"),
        ("up{a=1} 1", "no sample"),
        ('up{a="1",a="2"} 1', "label twice"),
        ("up", "no sample"),
        ("1up 1", "no sample"),
        ("up one", "no number"),
        ("up 1_000", "no number"),
        ("up 0x1p3", "no number"),
        ("up 1 2 3", "no sample"),
        ("up 1 1700000000000", "two values"),
        ("other 1 1-2", "no time stamp"),
        ("other 1", "no time stamp"),
        ("other 1 1700000000", "seconds"),
        ('up{a="' + "\\" * 5001 + '"', "no sample"),
        ('up{a="1"' + " " * 1_000_000 + "x", "no sample"),
        ("up 1" + " " * 1_000_000 + "x y", "no sample"),
        ("up " + "1" * 1_000_000 + "x", "no number"),
    ],
)
def test_a_line_that_can_not_be_used_is_refused_with_its_place(tmp_path, line, words):
    error = refusal(tmp_path, f"# TYPE up gauge\nup 0 1700000000000\n{line}\nup 1 1700000001000\n".encode())
    assert error.code == "malformed"
    assert error.line == 3
    assert words in error.message


def test_bytes_that_are_no_utf_8_are_told_as_escapes(tmp_path):
    error = refusal(tmp_path, b'up 1\nload{a="\xff"} 2\nload{a="\xff"} 3\n')
    assert error.code == "malformed"
    assert r'load{a="\xff"} comes twice' in error.message
    read = Read(tmp_path, b'up{a="\xff"} 1\n' * 3)
    assert read.names == [r'up{a="\xff"}']
    assert refusal(tmp_path, b'up{a="\xff"} 1\nload 2\n', max_columns=1).code == "too_many_columns"


@pytest.mark.parametrize("tail", [b"load 12", b'load{a="', b"load"])
def test_a_last_line_without_its_end_may_be_cut_and_is_not_used(tmp_path, tail):
    read = Read(tmp_path, b"up 1\nload 2\nup 1\nload 3\nup 5\n" + tail)
    np.testing.assert_array_equal(read.rows, [[2, 1], [3, 1], [np.nan, 5]])


def test_one_scrape_is_too_few_and_the_message_says_how_to_collect_more(tmp_path):
    (tmp_path / "node.prom").write_bytes(scrapes(1))
    with pytest.raises(DataError) as raised:
        describe([tmp_path / "node.prom"], DataConfig())
    assert raised.value.code == "too_few_rows"
    assert "one scrape is one row" in raised.value.remedy


def test_scrapes_in_files_of_their_own_are_one_dataset(tmp_path):
    paths = [tmp_path / f"{i}.prom" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_text(f"up 1\nload {i}\n")
    dataset, scaler = describe(paths, DataConfig())
    assert (dataset.num_rows, scaler.centre) == (3, [1.0, 1.0])


@pytest.mark.parametrize("data", [b"# TYPE up gauge\n# EOF\n", b"# HELP up x\n"])
def test_a_scrape_of_nothing_has_no_rows(tmp_path, data):
    assert refusal(tmp_path, data).code == "no_rows"


@pytest.mark.parametrize("data", [b"up\n1\n2\n", b"a b\n1 2\n", b"# a,b\n1,2\n3,4\n", b"load 1,5\nload 2,5\n"])
def test_what_only_looks_like_samples_is_delimited_text(tmp_path, data):
    try:
        assert Read(tmp_path, data).format == "csv"
    except DataError as error:
        assert error.code == "no_numeric"


def matrix(result, **more):
    return {"status": "success", "data": {"resultType": "matrix", "result": result}, **more}


def load_of(host, values, start=1_700_000_000.781, step=15):
    values = [[round(start + step * i, 3), str(value)] for i, value in enumerate(values)]
    return {"metric": {"job": "node", "__name__": "load", "host": host}, "values": values}


def test_a_range_query_is_a_table(tmp_path):
    first = {"metric": {}, "values": [[1_700_000_000.781 + 15 * i, str(i)] for i in range(10)]}
    result = [load_of('b"\\', range(10)), load_of("a", [0.5, "NaN", *range(8)]), first]
    for data in (
        json.dumps(matrix(result)),
        "\ufeff" + json.dumps(matrix(result, warnings=["slow"]), indent=2),
        json.dumps(matrix(result), sort_keys=True),
        json.dumps({"status": "success", "isPartial": False, **matrix(result)}),
    ):
        read = Read(tmp_path, data.encode())
        assert read.format == "prometheus-matrix"
        assert read.names == ['load{host="a",job="node"}', 'load{host="b\\"\\\\",job="node"}', "{}"]
        np.testing.assert_array_equal(read.rows, [[0.5, 0, 0], [np.nan, 1, 1], *([i - 2, i, i] for i in range(2, 10))])


def test_series_out_of_step_are_not_put_on_one_row(tmp_path):
    """Prometheus evaluates all series at the same times: what differs is meant to."""
    read = Read(tmp_path, json.dumps(matrix([load_of("a", range(9)), load_of("b", range(9), step=15.001)])).encode())
    apart = [row for i in range(1, 9) for row in ([i, np.nan], [np.nan, i])]
    np.testing.assert_array_equal(read.rows, [[0, 0], *apart])


@pytest.mark.parametrize(
    ("document", "code", "words"),
    [
        ({"status": "success", "data": {"resultType": "vector", "result": []}}, "unsupported_format", "vector"),
        ({"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}}, "unsupported_format", "scalar"),
        ({"status": "error", "errorType": "bad_data", "error": "parse error at 7"}, "unsupported_format", "error at 7"),
        (matrix([]), "no_rows", "no sample"),
        (matrix([{"metric": {"a": "b"}, "histograms": [[1, {}]]}]), "no_rows", "no sample"),
        (matrix([{"metric": {"a": "b"}, "values": [[1, 2]]}]), "malformed", "result 0"),
        (matrix([{"metric": {"a": "b"}, "values": [[1, "x"]]}]), "malformed", "no number"),
        (matrix([{"metric": {"a": "b"}, "values": [[1e300, "1"]]}]), "malformed", "out of range"),
        (matrix([load_of("a", [1, 2]), load_of("a", [1, 3])]), "malformed", "two values"),
        (matrix(7), "malformed", "array"),
    ],
)
def test_other_answers_are_refused_by_what_they_are(tmp_path, document, code, words):
    error = refusal(tmp_path, json.dumps(document).encode())
    assert error.code == code
    assert words in error.message
    assert error.remedy


def test_a_damaged_answer_is_refused_with_its_place(tmp_path):
    data = json.dumps(matrix([load_of("a", range(9))]), indent=1).encode()
    assert refusal(tmp_path, data[:-20]).code == "truncated"
    error = refusal(tmp_path, data + b'\n  {"status": 1}')
    assert (error.code, error.line) == ("malformed", data.count(b"\n") + 2)
