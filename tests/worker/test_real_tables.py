"""Files as dstat, perfmon, nvidia-smi, HAProxy and sysstat wrote them: their numbers, or the reason against them.

The figures were worked out beside the readers, with the csv module and decimal arithmetic. The files are beside the
repository, not in it.
"""

from pathlib import Path

import numpy as np
import pytest
from reading import Read, refusal

FORMATS = Path(__file__).parents[2].parent / "shared" / "data" / "formats"
PERFMON = r"\\DESKTOP-FUOCR3U"


def content(name):
    path = FORMATS / name
    if not path.exists():
        pytest.skip(f"needs ../shared/data/formats/{name} relative to the repository root")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "num_rows", "num_metrics", "dropped", "sums", "ignored"),
    [
        (
            "dstat/dool-1.3.0.csv",  # ten runs, one after the other in one file
            2656,
            17,
            {},
            {
                "memory usage/used": 31445053018112,
                "total cpu usage/usr": 2149.689,
                "net/total:recv": 5787231568,
                "net/total:send": 7249080640,
            },
            {"system/time": "not_numeric"},
        ),
        (
            "dstat/pcp-dstat.csv",
            383,
            61,
            {},
            {"total cpu usage/usr": 3854.393, "dsk/sda/read": 72741.484, "virtual memory/free": 1730589.159},
            {"epoch": "time"},
        ),
        (
            "perfmon/perfmon.csv",
            11520,  # of which the first has no rates yet
            4,
            {},
            {
                PERFMON + r"\Processor(_Total)\% Processor Time": 103745.6475925597800596034,
                PERFMON + r"\Processor(_Total)\% Idle Time": 759613.36225954693997866885,
                PERFMON + r"\Memory\Available MBytes": 81314105 + 7638,
                PERFMON + r"\LogicalDisk(_Total)\% Disk Time": 2074.4422542399312304800715,
            },
            {"(PDH-CSV 4.0) (Sri Lanka Standard Time)(-330)": "not_numeric"},
        ),
        (
            "nvidia_smi/gpu_log.csv",
            2619,
            4,
            {},
            {
                "utilization.gpu [%]": 217344,
                "utilization.memory [%]": 104309,
                "memory.used [MiB]": 46100862,
                "power.draw [W]": 733560.98,
            },
            {"timestamp": "not_numeric", "name": "identity"},
        ),
        (
            "nvidia_smi/power.csv",
            91,
            1,
            {},
            {"power.draw [W]": 5977.71},
            {"timestamp": "not_numeric", "index": "identity"},
        ),
    ],
)
def test_a_real_table_is_read_with_its_numbers(tmp_path, name, num_rows, num_metrics, dropped, sums, ignored):
    read = Read(tmp_path, content(name))
    assert read.rows.shape == (num_rows, num_metrics)
    assert read.dropped == dropped
    assert read.ignored == ignored
    totals = dict(zip(read.names, np.nansum(read.rows, axis=0).tolist(), strict=True))
    assert {name: totals[name] for name in sums} == pytest.approx(sums, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("haproxy/haproxy_stats.csv", 4, "several proxies"),
        ("sysstat/sadf-d.csv", 3, "several records for one time stamp"),
        ("sysstat/sadf-d-fan-temp.csv", 4, "several records for one time stamp"),
        ("sysstat/sar.txt", 1, "a table for the screen, as sar"),
        ("vmstat/mpstat-A-2-5.txt", 1, "a table for the screen, as sar, mpstat"),
        ("vmstat/iostat-x.txt", 1, "a table for the screen, as sar, mpstat, iostat"),
        ("vmstat/vmstat-at-5-10.txt", 1, "a table for the screen, as vmstat"),
    ],
)
def test_a_real_table_that_is_no_series_of_rows_is_refused_with_what_to_do(tmp_path, name, line, words):
    error = refusal(tmp_path, content(name))
    assert (error.code, error.line) == ("unsupported_format", line)
    assert words in error.message
    assert error.remedy


def test_each_table_of_a_real_sadf_file_that_has_one_record_per_time_stamp_is_read(tmp_path):
    lines = content("sysstat/sadf-d.csv").split(b"\n")
    load = lines.index(b"# hostname;interval;timestamp;runq-sz;plist-sz;ldavg-1;ldavg-5;ldavg-15;blocked")
    read = Read(tmp_path, b"\n".join(lines[load : load + 5]) + b"\n")
    assert read.names == ["runq-sz", "plist-sz", "ldavg-1", "ldavg-5", "ldavg-15", "blocked"]
    expected = [[float(cell) for cell in line.split(b";")[3:]] for line in lines[load + 1 : load + 5]]
    assert read.rows.tolist() == expected
    assert read.ignored == {"hostname": "identity", "interval": "time", "timestamp": "not_numeric"}
