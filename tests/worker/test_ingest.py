"""Ingest: the cache, the account of a dataset, several files as one, bounded memory, and real telemetry."""

import csv
import gzip
import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from retraind.config import DataConfig
from retraind.errors import DataError, HostError, Interrupted
from retraind.report import IgnoredColumn, MissingCells
from retraind.worker import ingest as ingest_module
from retraind.worker import rowcache
from retraind.worker.ingest import describe, ingest
from retraind.worker.readers import delimited
from retraind.worker.scaler import scale, soften

REAL_DATA = Path(__file__).parents[2].parent / "shared" / "data"
LIMITS = DataConfig()
# Small lines make small blocks legal, so that a small file has many.
SMALL = DataConfig(max_line_bytes=1024)


def write_csv(path, columns):
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(names), *(",".join(str(cell) for cell in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def softened(raw, ingested):
    """What the cache is to hold, from the raw values."""
    return soften(scale(raw, ingested.scaler))


def cached(ingested):
    rows = np.fromfile(ingested.rows.path, "<f4")
    return rows.reshape(ingested.rows.num_rows, ingested.rows.num_metrics)


def run(paths, work_dir, limits=LIMITS, beat=lambda _: None):
    work_dir.mkdir(exist_ok=True)
    return ingest(paths, work_dir, limits, beat)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 2048)
    monkeypatch.setattr(rowcache, "PASS_BYTES", 500)


def counters(num_rows):
    steps = np.arange(num_rows)
    return {
        "big": [2**53 + 1 + 10**6 * i for i in steps.tolist()],
        "huge": [18446744073709551615] * num_rows,
        "slow": [10**12 + 100 * (i % (num_rows // 2)) for i in steps.tolist()],
        "flat": [5] * num_rows,
        "noise": [repr(5 + 1e-13 * (i % 3)) for i in steps.tolist()],
        "late": [0] * (num_rows // 2) + [7.5e9] * (num_rows - num_rows // 2),
        "spike": [i % 10 for i in range(num_rows - 1)] + [1e20],
        "grown": [1e-30 * (i % 7) for i in range(num_rows - 1)] + [3e30],
    }


@pytest.mark.parametrize("num_rows", [40, 3000])
def test_the_cache_holds_the_rows_at_the_final_scale(tmp_path, small_blocks, num_rows):
    columns = counters(num_rows)
    path = write_csv(tmp_path / "a.csv", columns)
    ingested = run([path], tmp_path / "work", SMALL)
    raw = np.array([[float(cell) for cell in cells] for cells in columns.values()]).T
    rows = cached(ingested)
    assert ingested.rows.path == tmp_path / "work" / "rows.f32"
    assert rows.shape == raw.shape
    assert ingested.dataset.constant_metrics == ["huge", "flat", "noise"]
    np.testing.assert_allclose(ingested.scaler.centre, raw.mean(axis=0), rtol=1e-12)
    for index, name in enumerate(columns):
        if name in ingested.dataset.constant_metrics:
            assert not rows[:, index].any()
            assert ingested.scaler.scale[index] == 1.0
        else:
            # A mean near 1e12 is known to 1e-4, which is what the merging of blocks leaves of a spread of 1e4.
            np.testing.assert_allclose(ingested.scaler.scale[index], raw[:, index].std(), rtol=1e-7)
            np.testing.assert_allclose(rows[:, index], softened(raw, ingested)[:, index], atol=2e-5)
    assert (np.diff(rows[: num_rows // 2, 2]) > 0).all()  # no two steps of the counter near 1e12 fell together


def test_describe_says_the_same_as_ingest_and_writes_nothing(tmp_path):
    path = write_csv(tmp_path / "a.csv", counters(100) | {"host": ["web"] * 100, "ts": list(range(100))})
    ingested = run([path], tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    dataset, scaler = describe([path], LIMITS)
    assert (dataset, scaler) == (ingested.dataset, ingested.scaler)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_account_names_what_was_used_and_what_was_not(tmp_path):
    columns = {"ts": range(100), "host": ["web"] * 100, "a": [*range(99), ""], "b": [5] * 100}
    path = write_csv(tmp_path / "a.csv", columns)
    dataset, scaler = describe([path], LIMITS)
    assert dataset.name == "a.csv"
    assert dataset.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dataset.num_bytes == path.stat().st_size
    assert dataset.format == "csv"
    assert (dataset.num_rows, sum(dataset.num_dropped.values())) == (100, 0)
    assert (dataset.num_missing_cells, dataset.most_missing) == (1, [MissingCells(name="a", num_cells=1)])
    assert dataset.metric_names == ["a", "b"]
    assert dataset.ignored_columns == [
        IgnoredColumn(name="ts", reason="time"),
        IgnoredColumn(name="host", reason="not_numeric"),
    ]
    assert dataset.constant_metrics == ["b"]
    assert dataset.problems == []
    assert scaler.centre == [49.0, 5.0]


def test_an_account_of_hostile_bytes_can_be_sent(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'a,b\x1b[31m\n1,2\n3,\xff\n"5","6\xfe\xed\xa0\x80"\n' + b"1,2\n" * 20)
    dataset, _ = describe([path], LIMITS)
    assert len(dataset.problems) == 2
    assert dataset.metric_names[1].isprintable()
    assert msgspec.json.decode(msgspec.json.encode(dataset), type=type(dataset)) == dataset


def test_several_files_are_one_dataset_matched_by_name(tmp_path):
    first = write_csv(tmp_path / "1.csv", {"ts": range(50), "a": range(50), "b": range(100, 150)})
    (tmp_path / "job").mkdir()
    lines = [json.dumps({"b": 150 + i, "a": 50 + i, "note": "x", "ts": 1, "c": i}) for i in range(50)]
    second = tmp_path / "job" / "2.jsonl.gz"
    second.write_bytes(gzip.compress("\n".join(lines).encode()))
    third = write_csv(tmp_path / "3.csv", {"b": [200, ""], "a": [100, 101]})
    shares = []
    ingested = run([first, second.parent, third], tmp_path / "work", beat=shares.append)
    dataset = ingested.dataset
    assert dataset.name == "1.csv, 2.jsonl.gz, 3.csv"
    assert dataset.format == "csv, jsonl+gzip"
    assert dataset.num_bytes == sum(p.stat().st_size for p in (first, second, third))
    assert dataset.metric_names == ["a", "b"]
    assert [(c.name, c.reason) for c in dataset.ignored_columns] == [
        ("ts", "time"),
        ("note", "not_numeric"),
        ("c", "extra"),
    ]
    assert (dataset.num_rows, dataset.num_missing_cells) == (102, 1)
    assert ingested.rows.breaks == (50, 100), "no window reaches from one file into the next"
    assert ingested.scaler.centre == [50.5, 150.0]
    expected = np.stack([np.arange(102.0) - 50.5, np.append(np.arange(101.0) - 50, np.nan)], axis=1)
    np.testing.assert_allclose(cached(ingested), expected / np.nanstd(expected, axis=0), atol=1e-6)
    shares = [share for share in shares if share is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_later_file_without_a_metric_is_refused_by_its_name(tmp_path):
    first = write_csv(tmp_path / "1.csv", {"a": range(50), "b": range(50), "m17": range(50)})
    second = write_csv(tmp_path / "2.csv", {"a": range(50), "b": range(50)})
    with pytest.raises(DataError) as raised:
        describe([first, second], LIMITS)
    assert raised.value.code == "missing_columns"
    assert "m17" in raised.value.message
    assert "2.csv" in raised.value.message


def test_a_metric_that_is_text_in_a_later_file_is_refused_in_any_format(tmp_path):
    first = write_csv(tmp_path / "1.csv", {"up": [0, 1] * 50, "a": range(100)})
    second = write_csv(tmp_path / "2.csv", {"up": ["TRUE", "FALSE"] * 8, "a": range(16)})
    third = tmp_path / "3.lp"
    third.write_text("".join(f"m up=true,a={i} {1_700_000_000 + i}000000000\n" for i in range(16)))
    for later, prefix in ((second, ""), (third, "m.")):
        write_csv(first, {f"{prefix}up": [0, 1] * 50, f"{prefix}a": range(100)})
        with pytest.raises(DataError) as raised:
            describe([first, later], LIMITS)
        assert raised.value.code == "no_numeric"
        assert f"hold text: {prefix}up" in raised.value.message


def test_too_many_bad_rows_are_refused_at_the_first(tmp_path):
    path = write_csv(tmp_path / "a.csv", {"a": range(100), "b": ["x" if i % 4 == 2 else i for i in range(100)]})
    assert describe([path], DataConfig(max_bad_share=0.25))[0].num_rows == 75
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig(max_bad_share=0.24))
    assert (raised.value.code, raised.value.line, raised.value.column) == ("too_many_bad_rows", 4, 2)
    assert "25 not_a_number" in raised.value.message


def table_with_gaps(num_rows=3000):
    """Noise and counters with gaps; the last column has values in the last 200 rows only."""
    rng = np.random.default_rng(8)
    rows = rng.normal(size=(num_rows, 4)) * [1.0, 1e-3, 50.0, 1.0]
    rows[:, 1] += 7.0
    rows[:, 2] = 1e12 + 100.0 * np.arange(num_rows)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    rows[:, 3] = np.where(np.arange(num_rows) < num_rows - 200, np.nan, rows[:, 2])
    rows[np.isnan(rows).all(axis=1), 0] = 1.0
    return rows


def test_rows_with_gaps_are_kept_and_moments_are_of_what_is_there(tmp_path):
    rows = table_with_gaps()
    np.save(tmp_path / "a.npy", np.concatenate([rows, np.full((5, 4), np.nan)]))
    ingested = run([tmp_path / "a.npy"], tmp_path / "work", DataConfig(max_missing_share=1.0))
    dataset = ingested.dataset
    assert (dataset.num_rows, dataset.num_dropped["missing"]) == (3000, 5)
    assert (dataset.num_missing_cells, dataset.num_non_finite_cells) == (int(np.isnan(rows).sum()), 0)
    per_metric = np.isnan(rows).sum(axis=0).tolist()
    assert {found.name: found.num_cells for found in dataset.most_missing} == {
        f"column_{index}": number for index, number in enumerate(per_metric)
    }
    assert dataset.most_missing[0].name == "column_3"
    assert ingested.rows.has_missing
    np.testing.assert_allclose(ingested.scaler.centre, np.nanmean(rows, axis=0), rtol=1e-12)
    np.testing.assert_allclose(ingested.scaler.scale, np.nanstd(rows, axis=0), rtol=1e-9)
    np.testing.assert_allclose(cached(ingested), softened(rows, ingested), atol=1e-5)


def test_a_metric_whose_values_begin_late_keeps_its_digits(tmp_path, small_blocks):
    """Text in small blocks: the metric has one value in the first block, or none, and then a counter's."""
    rows = table_with_gaps()
    rows[0, 3] = 1e12  # in the sample, so that it is a metric; its row is no use
    lines = [",".join("" if math.isnan(cell) else repr(float(cell)) for cell in row) for row in rows]
    lines[0] = "oops," + lines[0].partition(",")[2]
    (tmp_path / "a.csv").write_text("a,b,c,late\n" + "\n".join(lines) + "\n")
    limits = DataConfig(max_missing_share=1.0, max_line_bytes=1024)
    ingested = run([tmp_path / "a.csv"], tmp_path / "work", limits)
    used = rows[1:]
    np.testing.assert_allclose(ingested.scaler.centre, np.nanmean(used, axis=0), rtol=1e-12)
    np.testing.assert_allclose(ingested.scaler.scale, np.nanstd(used, axis=0), rtol=1e-9)
    np.testing.assert_allclose(cached(ingested), softened(used, ingested), atol=1e-5)


def test_without_gaps_the_cache_says_so_and_infinity_is_one(tmp_path):
    whole = write_csv(tmp_path / "a.csv", {"a": range(50), "b": range(50)})
    assert not run([whole], tmp_path / "work").rows.has_missing
    holed = write_csv(tmp_path / "b.csv", {"a": [*range(49), "inf"], "b": [*range(48), "", "1e400"]})
    ingested = run([holed], tmp_path / "work")
    assert ingested.rows.has_missing
    assert (ingested.dataset.num_rows, ingested.dataset.num_dropped["non_finite"]) == (49, 1)
    assert (ingested.dataset.num_missing_cells, ingested.dataset.num_non_finite_cells) == (1, 0)
    assert np.argwhere(np.isnan(cached(ingested))).tolist() == [[48, 1]]


def test_a_column_without_a_value_is_left_out_and_fatal_to_nothing(tmp_path):
    """Constant, blank and all but constant: three columns that are easy to divide by zero with."""
    noise = [5 + 1e-13 * (-1) ** i for i in range(300)]
    path = write_csv(tmp_path / "a.csv", {"m07": [5] * 300, "m08": [""] * 300, "m09": noise, "a": range(300)})
    ingested = run([path], tmp_path / "work")
    assert ingested.dataset.ignored_columns == [IgnoredColumn(name="m08", reason="empty")]
    assert ingested.dataset.constant_metrics == ["m07", "m09"]
    assert (ingested.dataset.num_missing_cells, ingested.dataset.num_rows) == (0, 300)
    assert not cached(ingested)[:, :2].any()


def test_a_metric_of_infinities_only_is_constant_and_missing_throughout(tmp_path):
    path = write_csv(tmp_path / "a.csv", {"a": range(50), "b": ["inf"] * 50})
    ingested = run([path], tmp_path / "work", DataConfig(max_missing_share=0.5))
    assert (ingested.dataset.constant_metrics, ingested.dataset.num_non_finite_cells) == (["b"], 50)
    assert (ingested.scaler.centre[1], ingested.scaler.scale[1]) == (0.0, 1.0)
    assert np.isnan(cached(ingested)[:, 1]).all()


def test_too_many_missing_cells_are_refused_and_the_worst_columns_named(tmp_path):
    columns = {"a": range(100), "b": ["" if i % 2 else i for i in range(100)], "c": [*range(90), *["NA"] * 10]}
    path = write_csv(tmp_path / "a.csv", columns)
    dataset, _ = describe([path], DataConfig(max_missing_share=0.2))
    assert dataset.num_missing_cells == 60
    assert dataset.most_missing == [MissingCells(name="b", num_cells=50), MissingCells(name="c", num_cells=10)]
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig(max_missing_share=0.199))
    assert raised.value.code == "too_many_missing"
    assert "60 of 300 cells" in raised.value.message
    assert raised.value.message.endswith("b 50%, c 10%")
    assert "data.max_missing_share" in raised.value.remedy


def test_the_list_of_metrics_that_lack_most_is_bounded(tmp_path):
    columns = {f"m{k:02d}": [""] * (k + 1) + ["1"] * (99 - k) for k in range(40)}
    dataset, _ = describe([write_csv(tmp_path / "a.csv", columns | {"z": range(100)})], DataConfig(max_missing_share=1))
    assert [found.name for found in dataset.most_missing] == [f"m{k}" for k in range(39, 19, -1)]
    assert dataset.num_missing_cells == sum(range(1, 41))


@pytest.mark.parametrize(("num_rows", "is_enough"), [(1, False), (2, True)])
def test_too_few_rows_are_refused(tmp_path, num_rows, is_enough):
    path = write_csv(tmp_path / "a.csv", {"a": range(num_rows)})
    if is_enough:
        assert describe([path], LIMITS)[0].num_rows == num_rows
        return
    with pytest.raises(DataError) as raised:
        describe([path], LIMITS)
    assert raised.value.code == "too_few_rows"


def test_an_error_leaves_no_cache(tmp_path, small_blocks):
    path = write_csv(tmp_path / "a.csv", {"a": range(2000), "b": [*range(1999), '"']})
    with pytest.raises(DataError):
        run([path], tmp_path / "work", SMALL)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("after", [1, 5, 40])
def test_a_beat_can_stop_the_reading(tmp_path, small_blocks, after):
    path = write_csv(tmp_path / "a.csv", {"a": range(5000), "b": range(5000)})
    shares = []

    def beat(share):
        shares.append(share)
        if len(shares) == after:
            raise Interrupted("terminated", "asked to stop")

    with pytest.raises(Interrupted):
        run([path], tmp_path / "work", SMALL, beat)
    assert len(shares) == after
    assert list((tmp_path / "work").iterdir()) == []


def test_there_is_a_beat_for_each_block_and_for_each_part_of_the_last_pass(tmp_path, small_blocks):
    path = write_csv(tmp_path / "a.csv", {"a": range(5000), "b": range(5000)})
    shares = []
    run([path], tmp_path / "work", SMALL, shares.append)
    assert len([s for s in shares if s is not None]) >= path.stat().st_size / 2048
    assert shares.count(None) == math.ceil(5000 / (500 // 8))


def test_a_full_disk_is_the_hosts_fault(tmp_path):
    full = Path("/dev/full")  # every write there fails with ENOSPC
    if not full.is_char_device():
        pytest.skip("needs /dev/full, which this machine lacks")  # the link would make a plain file of that name
    path = write_csv(tmp_path / "a.csv", {"a": range(5000)})
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    (work_dir / "rows.f32").symlink_to(full)
    with pytest.raises(HostError) as raised:
        run([path], work_dir)
    assert raised.value.code == "disk_full"


def test_a_missing_work_directory_is_the_hosts_fault(tmp_path):
    path = write_csv(tmp_path / "a.csv", {"a": range(5000)})
    with pytest.raises(HostError) as raised:
        ingest([path], tmp_path / "none", LIMITS, lambda _: None)
    assert raised.value.code == "host_io"


def test_no_memory_passes(tmp_path, monkeypatch):
    def exhausted(rows):
        raise MemoryError

    path = write_csv(tmp_path / "a.csv", {"a": range(50)})
    monkeypatch.setattr(ingest_module, "moments_of", exhausted)
    with pytest.raises(MemoryError):
        run([path], tmp_path / "work")


# Not ru_maxrss: that begins with the size of the process that started this one.
PEAK = """
import re, sys
from pathlib import Path
from retraind.config import DataConfig
from retraind.worker.ingest import ingest
rows = ingest([Path(sys.argv[1])], Path(sys.argv[2]), DataConfig(), lambda share: None).rows
print(rows.num_rows, re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_mib(path, work_dir):
    """Rows, and the peak resident size of a process that ingests a file."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, path, work_dir], check=True, capture_output=True, text=True, timeout=300
    )
    num_rows, peak_kib = map(int, run.stdout.split())
    return num_rows, peak_kib / 1024


def test_memory_does_not_grow_with_the_file(tmp_path):
    rng = np.random.default_rng(6)
    lines = b"".join(
        b"2026-01-01T00:00:00Z," + ",".join(f"{cell:.6f}" for cell in row).encode() + b"\n"
        for row in rng.normal(size=(10_000_000 // 320, 32))
    )
    header = ",".join(["time", *(f"m{k}" for k in range(32))]).encode() + b"\n"
    peaks = []
    for copies in (1, 4):
        path = tmp_path / f"{copies}.csv"
        path.write_bytes(header + lines * copies)
        assert path.stat().st_size >= copies * 9_000_000
        num_rows, peak = peak_mib(path, tmp_path)
        assert num_rows == copies * (10_000_000 // 320)
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 16


# What a server spares for reading. The interpreter with numpy, pandas and pyarrow takes 110 to 140 of it.
MAX_PEAK_MIB = 250


def test_memory_is_bounded_where_rows_are_as_short_as_they_can_be(tmp_path):
    path = tmp_path / "short.csv"
    path.write_bytes(b"1\n3\n" * 6_000_000)
    num_rows, peak = peak_mib(path, tmp_path)
    assert num_rows == 12_000_000
    assert peak < MAX_PEAK_MIB


def test_memory_is_bounded_where_a_parquet_file_is_one_group_of_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    path, rng = tmp_path / "group.parquet", np.random.default_rng(7)
    columns = {f"m{k}": rng.normal(size=3_000_000) for k in range(12)}
    parquet.write_table(arrow.table(columns), path, row_group_size=3_000_000)
    assert path.stat().st_size > MAX_PEAK_MIB * 2**20
    num_rows, peak = peak_mib(path, tmp_path)
    assert num_rows == 3_000_000
    assert peak < MAX_PEAK_MIB


# What the csv module and float() find in real files, without any of the product's code.
REAL_FILES = [
    ("smd/machine-1-6_train.csv.gz", ",", 0, [], 38, 5),
    ("asd/omi-1_train.csv.gz", ",", 0, [], 19, 0),
    ("skab/anomaly-free/anomaly-free.csv", ";", 1, ["datetime"], 8, 0),
    ("nab/realAWSCloudwatch/ec2_cpu_utilization_5f5533.csv", ",", 1, ["timestamp"], 1, 0),
]


@pytest.mark.parametrize(("name", "delimiter", "num_header", "ignored", "num_metrics", "num_constant"), REAL_FILES)
def test_real_telemetry_is_read_as_it_is(tmp_path, name, delimiter, num_header, ignored, num_metrics, num_constant):
    path = REAL_DATA / name
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name} relative to the repository root")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="") as file:
        table = list(csv.reader(file, delimiter=delimiter))[num_header:]
    raw = np.array([[float(cell) for cell in cells[len(ignored) :]] for cells in table])
    ingested = run([path], tmp_path / "work")
    dataset = ingested.dataset
    assert dataset.num_rows == len(table)
    assert sum(dataset.num_dropped.values()) == 0
    assert len(dataset.metric_names) == num_metrics
    assert [column.name for column in dataset.ignored_columns] == ignored
    assert len(dataset.constant_metrics) == num_constant
    sums = [math.fsum(column) for column in raw.T]
    np.testing.assert_allclose(np.array(ingested.scaler.centre) * dataset.num_rows, sums, rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(cached(ingested), softened(raw, ingested), atol=2e-6)


def test_a_refused_file_is_named_by_its_sha256_with_signs_of_life_all_the_while(tmp_path):
    data = bytes(5 * 2**20 + 1)
    (tmp_path / "refused.csv").write_bytes(data)
    beats = []
    assert ingest_module.sha256_of_dataset([tmp_path / "refused.csv"], beats.append) == hashlib.sha256(data).hexdigest()
    assert len(beats) == 6
