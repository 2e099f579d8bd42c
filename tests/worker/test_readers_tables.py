"""Tables as tools export them: preambles, two header rows, "#" before the header, units, records of several things."""

import numpy as np
import pytest
from reading import Read, refusal, with_gaps

from retraind.worker.readers import delimited
from retraind.worker.readers.layout import MAX_LINES_ABOVE
from retraind.worker.readers.numbers import UNITS


def text(*lines):
    return "".join(line + "\n" for line in lines).encode()


DSTAT = [
    '"Dstat 0.7.3 CSV output"',
    '"Author:","Some Body <body@example.org>,,,,"URL:","http://example.org/dstat/"',  # the quote is not closed
    '"Host:","web-1",,,,"User:","root"',
    '"Cmdline:","dstat --epoch --output x.csv",,,,"Date:","01 Jan 2026 00:00:00 UTC"',
]
NAMES = ['"epoch","total cpu usage",,"net/eth0",,"system"', '"epoch","usr","sys","net/eth0:recv","send","int"']
ROWS = ["1767225600.1,1.5,2,300,400,5", "1767225601.1,2.5,3,301,401,6", "1767225602.1,3.5,4,302,402,7"]
NUMBERS = [[1.5, 2, 300, 400, 5], [2.5, 3, 301, 401, 6], [3.5, 4, 302, 402, 7]]
JOINED = ["total cpu usage/usr", "total cpu usage/sys", "net/eth0:recv", "net/eth0/send", "system/int"]


@pytest.mark.parametrize(
    "preamble",
    [
        DSTAT,
        [*DSTAT, ""],
        [*DSTAT, "", ""],
        ["", *DSTAT],
        ['"dool 1.3.0 CSV output"', *DSTAT[2:]],
        ['"pcp-dstat 5.0.3 CSV Output"', DSTAT[1]],
        ['"Dstat 0.7.3 CSV output",,,,,'],
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_of_dstat_is_read_with_groups_before_its_names(tmp_path, preamble, end):
    data = end.join([*preamble, *NAMES, *ROWS, ""]).encode()
    read = Read(tmp_path, b"\xef\xbb\xbf" + data)
    assert read.names == JOINED
    assert read.rows.tolist() == NUMBERS
    assert read.ignored == {"epoch": "time"}
    assert read.dropped == {}


@pytest.mark.parametrize("block_bytes", [64, 200, 4096])
def test_a_second_run_in_the_same_file_goes_on_in_the_same_columns(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block_bytes)
    read = Read(tmp_path, text(*DSTAT, *NAMES, *ROWS, "", "", *DSTAT, *NAMES, *ROWS, "x"), max_line_bytes=1024)
    assert read.rows.tolist() == NUMBERS * 2
    assert read.dropped == {"ragged": 1}
    assert read.problems[0][0] == 21  # lines that are taken out still count


def test_a_second_run_with_other_columns_is_refused_although_it_is_as_wide(tmp_path):
    other = [NAMES[0], NAMES[1].replace("usr", "idl")]
    error = refusal(tmp_path, text(*DSTAT, *NAMES, *ROWS, *DSTAT, *other, *ROWS))
    assert (error.code, error.line) == ("malformed", 15)
    narrow = [*DSTAT, '"total cpu usage"', '"usr"', "1", "2"]
    error = refusal(tmp_path, text(*narrow, *narrow[:5], '"sys"', "3", "4"))
    assert (error.code, error.line) == ("malformed", 14)
    assert error.remedy


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ([*DSTAT, NAMES[0], *ROWS], "malformed", 5),
        ([*DSTAT, NAMES[0], '"epoch","usr"', *ROWS], "malformed", 5),
        ([*DSTAT, *ROWS], "malformed", 5),
        (DSTAT, "malformed", 5),
        ([*DSTAT, *NAMES], "no_rows", None),
        ([*DSTAT, *NAMES, "1,2,3", "4,5,6"], "malformed", 7),
        ([*DSTAT, NAMES[0], NAMES[1].replace("sys", "usr"), *ROWS], "ambiguous_columns", None),
        ([DSTAT[0], *DSTAT[1:2] * MAX_LINES_ABOVE, *NAMES, *ROWS], "malformed", MAX_LINES_ABOVE + 1),
        (["a report of today", "a,b", "1,2", "3,4"], "malformed", 2),
    ],
)
def test_a_preamble_without_a_header_of_its_kind_is_refused(tmp_path, lines, code, line):
    error = refusal(tmp_path, text(*lines))
    assert (error.code, error.line) == (code, line)


def test_a_file_of_perfmon_has_counter_paths_as_names_and_no_first_rates(tmp_path):
    lines = [
        '"(PDH-CSV 4.0) (W. Europe Standard Time)(-60)","\\\\PC\\Memory\\Available MBytes","\\\\PC\\CPU(_Total)\\%"'
    ]
    lines += ['"01/31/2026 05:55:48.490"," "," "', '"01/31/2026 05:56:48.490","7638","1.5"']
    read = Read(tmp_path, text(*lines, '"01/31/2026 05:57:48.490","7639","2.5"'))
    assert read.names == [r"\\PC\Memory\Available MBytes", r"\\PC\CPU(_Total)\%"]
    assert read.rows.tolist() == [[7638, 1.5], [7639, 2.5]]
    assert read.dropped == {"missing": 1}


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["# a,b", "1,2", "3,4"], ["a", "b"]),
        (["", "#a,b", "1,2", "3,4"], ["a", "b"]),
        (["# made by x", "# a,b", "1,2", "3,4"], ["a", "b"]),
        (["# made by x", "a,b", "1,2", "3,4"], ["a", "b"]),
        (["# made by x, version 3", "a,b", "1,2", "3,4"], ["a", "b"]),
        (["# made by x", "", "1,2", "3,4"], ["column_0", "column_1"]),
        (["# a;b", "1,0;2", "3;4,0"], ["a", "b"]),
        (["# a,b", "1,2", "# a,b", "3,4"], ["a", "b"]),
        (["# host,a,b,", "x,1,2,", "x,3,4,"], ["a", "b"]),
        (["# made by x, version 3", "host,a,b,", "x,1,2,", "x,3,4,"], ["a", "b"]),
        (["# " + "x" * 200_000, "a,b", "1,2", "3,4"], ["a", "b"]),
    ],
)
def test_lines_with_a_hash_above_the_rows_are_a_header_or_comments(tmp_path, lines, names):
    read = Read(tmp_path, text(*lines))
    assert read.names == names
    assert read.rows.tolist() == [[1, 2], [3, 4]]
    assert read.dropped == {}


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["# a,b,c", "1,2", "3,4"], 1),
        (["# a,2", "1,2", "3,4"], 1),
        (["#1,2", "1,2", "3,4"], 1),
        (["# host,a", "x,", "y,1", "z,2"], 1),
        (["# a,b", "1,2", "# b,a", "3,4"], 3),
        (["# host,a", "x,2", "# name,b", "x,4"], 3),
    ],
)
def test_a_line_with_a_hash_that_may_be_either_is_refused(tmp_path, lines, line):
    error = refusal(tmp_path, text(*lines))
    assert (error.code, error.line) == ("malformed", line)


def test_a_comment_between_the_rows_is_counted_and_no_header(tmp_path):
    rows = [f"x{i},{i},{i}" for i in range(30)]
    read = Read(tmp_path, text("# made by x, version 3", "c,a,b", *rows, "# paused, resumed", *rows))
    assert read.dropped == {"ragged": 1}
    read = Read(tmp_path, text("# c,a,b", *rows, "# paused", "#x,1,2", *rows))
    assert read.dropped == {"ragged": 1}
    assert read.names == ["a", "b"]
    assert len(read.rows) == 61


def test_a_table_whose_texts_begin_with_a_hash_is_no_comment(tmp_path):
    read = Read(tmp_path, text("colour,n", *(f"#f{i},{i}" for i in range(9))))
    assert read.rows.tolist() == [[i] for i in range(9)]


@pytest.mark.parametrize("first", ["sda     0", "0"])
def test_numbers_with_decimal_commas_between_blanks_are_refused(tmp_path, first):
    error = refusal(tmp_path, text(*(f"{first},{i}    0,00      0,79     {i},25" for i in range(10, 40))))
    assert (error.code, error.line) == ("malformed", 1)
    assert "blanks" in error.message


def test_a_running_index_beside_dotted_names_is_no_gpu(tmp_path):
    read = Read(tmp_path, text("index,memory.used,cpu.load", *(f"{i},{i},{i}" for i in range(9))))
    assert read.names == ["index", "memory.used", "cpu.load"]


@pytest.mark.parametrize("row", ["x,-", "x,[N/A]", ",x"])
def test_a_first_row_without_a_number_is_no_header_below_a_hash(tmp_path, row):
    read = Read(tmp_path, text("# host,a", row, *(f"x,{i}" for i in range(9))))
    assert read.names == ["a"]
    assert read.rows.tolist() == [[i] for i in range(9)]


HAPROXY = "# pxname,svname,scur,stot,"


def test_a_proxy_over_time_is_read_and_several_proxies_are_refused(tmp_path):
    read = Read(tmp_path, text(HAPROXY, *(f"www,BACKEND,{i},{i * 2}," for i in range(9))))
    assert read.rows.tolist() == [[i, i * 2] for i in range(9)]
    assert read.ignored == {"pxname": "identity", "svname": "identity", "column_4": "empty"}
    error = refusal(tmp_path, text(HAPROXY, "www,BACKEND,1,2,", "www,web-1,3,4,"))
    assert (error.code, error.line) == ("unsupported_format", 3)


SADF = "# hostname;interval;timestamp;CPU;%user;%idle"
RESTART = "web;-1;2026-01-01 00:30:00 UTC;LINUX-RESTART\t(8 CPU)"


def sadf_row(minute, cpu=-1):
    return f"web;60;2026-01-01 00:{minute:02d}:00 UTC;{cpu};{minute}.50;{99 - minute}.00"


@pytest.mark.parametrize("block_bytes", [64, 4096])
def test_one_table_of_sadf_is_read_with_headers_repeated_and_restarts_counted(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", block_bytes)
    lines = [RESTART, SADF, *map(sadf_row, range(30)), RESTART, SADF, *map(sadf_row, range(30, 60))]
    read = Read(tmp_path, text(*lines), max_line_bytes=1024)
    assert read.names == ["%user", "%idle"]
    assert read.rows.tolist() == [[i + 0.5, 99 - i] for i in range(60)]
    assert read.dropped == {"ragged": 2}
    assert [problem[0] for problem in read.problems] == [1, 33]
    assert read.ignored == {
        "hostname": "identity",
        "interval": "time",
        "timestamp": "not_numeric",
        "CPU": "identity",
    }


@pytest.mark.parametrize("num_good", [0, 60 * 100])
@pytest.mark.parametrize(
    "lines",
    [
        ["# hostname;interval;timestamp;proc/s;cswch/s", "web;60;2026-01-02 00:00:00 UTC;1.0;2.0"],
        ["# hostname;interval;timestamp;CPU;%idle;%user", sadf_row(1)],  # as wide, and other columns
        [sadf_row(1, cpu=-1), sadf_row(1, cpu=0), sadf_row(1, cpu=1)],
    ],
)
def test_several_tables_or_records_of_sadf_are_refused_with_the_way_to_export_one(tmp_path, lines, num_good):
    rows = [f"web;60;{i};-1;1.50;2.00" for i in range(num_good)]
    error = refusal(tmp_path, text(SADF, *rows, *lines))
    assert error.code == "unsupported_format"
    assert error.line in {num_good + 2, num_good + 3}
    assert "sadf -j" in error.remedy


def test_records_of_several_processors_are_refused_also_without_the_hash(tmp_path):
    error = refusal(tmp_path, text(SADF[2:], sadf_row(1, cpu=0), sadf_row(2, cpu=1)))
    assert error.code == "unsupported_format"


NVIDIA = "timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W], fan.speed [%]"


def gpu_row(i, index=0):
    return f"2026/01/03 15:36:{i:02d}.507, {index}, NVIDIA X, {i} %, {1000 + i} MiB, {30 + i}.25 W, [N/A]"


def test_units_are_taken_off_the_numbers_of_a_column(tmp_path):
    read = Read(tmp_path, text(NVIDIA, *map(gpu_row, range(60))))
    assert read.names == ["utilization.gpu [%]", "memory.used [MiB]", "power.draw [W]"]
    assert read.rows.tolist() == [[i, 1000 + i, 30.25 + i] for i in range(60)]
    assert read.ignored == {
        "timestamp": "not_numeric",
        "index": "identity",
        "name": "identity",
        "fan.speed [%]": "empty",
    }


def test_a_table_with_units_and_without_a_header_keeps_its_first_row(tmp_path):
    read = Read(tmp_path, text(*map(gpu_row, range(60))))
    assert read.rows[:, 1:].tolist() == [[i, 1000 + i, 30.25 + i] for i in range(60)]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("5 GiB", "not_a_number"),
        ("5", "not_a_number"),
        ("5MiB", "not_a_number"),
        ("5 MiB/s", "not_a_number"),
        ("MiB", "not_a_number"),
        ("[N/A]", "missing"),
        ("[Not Supported]", "missing"),
        ("[Unknown Error]", "missing"),
        ("", "missing"),
        ("inf", "non_finite"),
        ("1e39 MiB", "non_finite"),
    ],
)
def test_a_number_of_another_unit_is_never_added_up(tmp_path, cell, reason):
    lines = [gpu_row(i) for i in range(60)]
    lines[30] = lines[30].replace("1030 MiB", cell)
    read = Read(tmp_path, text(NVIDIA, *lines))
    if reason == "not_a_number":
        assert read.dropped == {reason: 1}
        assert read.problems[0][:2] == (32, 5)
        assert read.rows[:, 1].tolist() == [1000 + i for i in range(60) if i != 30]
    else:
        assert (read.dropped, read.num_non_finite) == ({}, int(reason == "non_finite"))
        np.testing.assert_array_equal(read.rows[:, 1], with_gaps(range(1000, 1060), 30))


def test_a_unit_in_a_column_of_bare_numbers_is_no_number(tmp_path):
    read = Read(tmp_path, text("a,b", *(f"{i},{i}" for i in range(50)), "1 W,2"))
    assert read.dropped == {"not_a_number": 1}
    assert len(read.rows) == 50


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_of_the_set_is_known_and_its_case_counts(tmp_path, unit):
    read = Read(tmp_path, text("a;b", *(f"{i},5 {unit};{i}" for i in range(9))))
    assert read.rows.tolist() == [[i + 0.5, i] for i in range(9)]
    if unit != "%":
        other = Read(tmp_path, text("a,b", *(f"{i} {unit.swapcase()}x,{i}" for i in range(9))))
        assert other.names == ["b"]


def test_several_gpus_that_nothing_but_their_name_tells_apart_are_refused(tmp_path):
    lines = [gpu_row(i // 2).replace("NVIDIA", f"NVIDIA {i % 2}") for i in range(20)]
    without_index = [line.split(", ") for line in [NVIDIA, *lines]]
    error = refusal(tmp_path, text(*(", ".join(cells[:1] + cells[2:]) for cells in without_index)))
    assert (error.code, error.line) == ("unsupported_format", 3)
    assert "index" in error.remedy


def test_joined_logs_of_nvidia_smi_with_other_columns_are_refused(tmp_path):
    rows = [gpu_row(i) for i in range(60)]
    other = NVIDIA.replace("memory.used [MiB]", "memory.free [MiB]")
    error = refusal(tmp_path, text(NVIDIA, *rows, other, *rows))
    assert (error.code, error.line) == ("malformed", 62)
    assert Read(tmp_path, text(NVIDIA, *rows, NVIDIA, *rows)).dropped == {"not_a_number": 1}


@pytest.mark.parametrize("cell", ["[N/A]", "[n/a]", "[Not Supported]", "[NOT SUPPORTED]", "[Unknown Error]", "ERR!"])
def test_what_nvidia_smi_writes_for_no_value_is_missing_in_any_table(tmp_path, cell):
    read = Read(tmp_path, text("a,b", *(f"{i},{i}" for i in range(50)), f"1,{cell}"))
    np.testing.assert_array_equal(read.rows[49:], [[49, 49], [1, np.nan]])


@pytest.mark.parametrize(
    "lines",
    [
        [
            "Linux 6.1.0-18-amd64 (web-1) \t01/31/2026 \t_x86_64_\t(8 CPU)",
            "",
            "12:00:01  CPU  %usr",
            "12:00:02  all 1,5",
        ],
        ["Linux 6.1.0-18-amd64 (web-1)  2026-01-31  _x86_64_  (8 CPU)", "", "Device r/s w/s", "sda 0,24 0,79"],
        ["procs -----------memory---------- ---swap--", " r  b   swpd   free", " 1  0      0  12345"],
        ["procs -------------------memory------------------ -swap-", " r  b", " 1  0"],
    ],
)
def test_a_table_for_the_screen_is_refused_with_the_way_to_a_file(tmp_path, lines):
    error = refusal(tmp_path, text(*lines))
    assert (error.code, error.line) == ("unsupported_format", 1)
    assert "sadf" in error.remedy


@pytest.mark.parametrize("is_quoted", [True, False])
def test_files_of_different_columns_joined_into_one_are_refused(tmp_path, is_quoted):
    def line(*cells):
        return ",".join(f'"{cell}"' if is_quoted else str(cell) for cell in cells)

    rows = [line(i, i + 1, "x") for i in range(3000)]
    error = refusal(tmp_path, text("a,b,c", *rows, "b,a,c", *rows))
    assert (error.code, error.line) == ("malformed", 3002)
    same = Read(tmp_path, text("a,b,c", *rows, "a,b,c", *rows))
    assert same.dropped == {"not_a_number": 1}
    np.testing.assert_array_equal(same.rows, [[i, i + 1] for i in [*range(3000), *range(3000)]])


@pytest.mark.parametrize(
    ("header", "other"),
    [("time,cpu", "Time,mem"), ("1m,5m", "5m,15m"), ("host,cpu,mem", "name,mem,cpu"), ("a,5m", "a,1m")],
)
def test_any_header_of_other_names_between_the_rows_is_refused(tmp_path, header, other):
    rows = [",".join(f"{i}" for _ in header.split(",")) for i in range(5000)]
    error = refusal(tmp_path, text(header, *rows, other, *rows))
    assert (error.code, error.line) == ("malformed", 5002)
    assert Read(tmp_path, text(header, *rows, header, *rows)).dropped == {"not_a_number": 1}


def test_a_row_of_one_word_is_no_header(tmp_path):
    rows = [f"{i},{i},{i}" for i in range(300)]
    read = Read(tmp_path, text("t,a,b", *rows, "1,error,error", "error,2,3", ",x,x", *rows))
    assert read.dropped == {"not_a_number": 3}


def test_a_row_of_units_below_the_header_only_costs_that_row(tmp_path):
    read = Read(tmp_path, text("t,cpu,mem", "s,%,MiB", *(f"{i},{i},{i}" for i in range(50))))
    assert read.names == ["t", "cpu", "mem"]
    assert read.dropped == {"not_a_number": 1}
