"""Parquet, by pyarrow where there is one, and what is said where there is none."""

import io
import sys
from decimal import Decimal

import numpy as np
import pytest
from reading import Read, refusal

from retraind.errors import ReaderMissing
from retraind.worker.readers import arrowtable, parquet, source

ROWS = np.random.default_rng(5).normal(size=(300, 4))


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="needs pyarrow, which is optional")


def saved(columns, **options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, **options)
    return file.getvalue()


def test_without_pyarrow_the_file_waits_and_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ReaderMissing) as raised:
        Read(tmp_path, b"PAR1\x15\x04")
    assert raised.value.code == "no_reader"
    assert "Parquet" in raised.value.message
    assert "python3-pyarrow" in raised.value.remedy
    assert "retraind[arrow]" in raised.value.remedy
    assert "CSV" in raised.value.remedy


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"row_group_size": 7}, {"use_dictionary": False}])
@pytest.mark.parametrize("block_bytes", [1, parquet.BLOCK_BYTES])
def test_columns_of_numbers_are_metrics_whatever_their_type(tmp_path, monkeypatch, arrow, options, block_bytes):
    for module in (arrowtable, parquet):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(module, "SAMPLE_ROWS", 10)
    columns = {
        "time": arrow.array(range(300), arrow.timestamp("ms")),
        "load": ROWS[:, 0],
        "temp": ROWS[:, 1].astype("f4"),
        "host": ["web1"] * 300,
        "rx": arrow.array([2**64 - 1 - i for i in range(300)], arrow.uint64()),
        "price": [Decimal(i).scaleb(-2) for i in range(300)],
        "level": arrow.array([i % 3 for i in range(300)]).dictionary_encode(),
        "up": [True] * 300,
        "buckets": [[1, 2]] * 300,
        "none": arrow.nulls(300, arrow.float64()),
    }
    read = Read(tmp_path, saved(columns, **options))
    assert read.format == "parquet"
    assert read.names == ["load", "temp", "rx", "price", "level"]
    unused = dict.fromkeys(("host", "up", "buckets"), "not_numeric")
    assert read.ignored == unused | {"none": "empty", "time": "time"}
    steps = np.arange(300)
    expected = [ROWS[:, 0], columns["temp"], (2.0**64 - steps).astype("f8"), steps / 100, steps % 3]
    np.testing.assert_allclose(read.rows, np.stack(expected, axis=1), rtol=1e-15)


def test_a_null_is_a_missing_cell(tmp_path, arrow):
    read = Read(tmp_path, saved({"s": ["x"] * 4, "a": [1, None, 3, 4], "b": [1.5, 2.5, float("inf"), float("nan")]}))
    assert (read.dropped, read.num_non_finite) == ({}, 1)
    np.testing.assert_array_equal(read.rows, [[1, 1.5], [np.nan, 2.5], [3, np.nan], [4, np.nan]])


def test_what_can_not_be_used_is_refused(tmp_path, arrow):
    data = saved({"a": ROWS[:, 0], "b": ROWS[:, 1]})
    assert refusal(tmp_path, data[:-1]).code == "truncated"
    assert refusal(tmp_path, data[:-4] + b"PARE").code == "unsupported_format"
    assert refusal(tmp_path, data[: len(data) // 2] + b"PAR1").code == "malformed"
    summed = saved({"a": ROWS[:, 0], "b": ROWS[:, 1]}, write_page_checksum=True)
    assert refusal(tmp_path, summed[:500] + bytes(1) + summed[501:]).code == "malformed"
    assert refusal(tmp_path, saved({"a": ROWS[:0, 0]})).code == "no_rows"
    assert refusal(tmp_path, saved({"a": ["x"], "b": [True]})).code == "no_numeric"
    assert refusal(tmp_path, saved({"a": [1, 2], "A": [1, 2]})).code == "ambiguous_columns"
    assert refusal(tmp_path, data, max_columns=1).code == "too_many_columns"
    assert refusal(tmp_path, data, max_uncompressed_bytes=1000).code == "too_large"


def test_rows_of_one_value_are_bounded_though_they_have_no_bytes(tmp_path, monkeypatch, arrow):
    monkeypatch.setattr(source, "SMALL_BYTES", 2**20)
    data = saved({"a": np.ones(10**6)})
    assert len(data) < 20_000
    assert "200 times" in refusal(tmp_path, data).message
    assert refusal(tmp_path, data, max_uncompressed_bytes=7_999_999).code == "too_large"
    assert len(Read(tmp_path, data, max_unpack_ratio=10**4).rows) == 10**6


def test_a_row_group_that_memory_can_not_hold_is_refused(tmp_path, monkeypatch, arrow):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1000)
    error = refusal(tmp_path, saved({"a": ROWS[:, 0]}))
    assert error.code == "too_large"
    assert "row groups" in error.remedy
