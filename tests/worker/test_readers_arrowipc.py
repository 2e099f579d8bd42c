"""Arrow files, Feather and Arrow streams, by pyarrow where there is one."""

import io
import random
import sys
from decimal import Decimal

import numpy as np
import pytest
from reading import Everything, Read, refusal

from retraind.errors import DataError, ReaderMissing
from retraind.worker.readers import arrowipc, source

ROWS = np.random.default_rng(5).normal(size=(300, 3))
MAKERS = ("new_file", "new_stream")


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="needs pyarrow, which is optional")


def columns(num_rows=300):
    import pyarrow as pa

    return {
        "time": pa.array(range(num_rows), pa.timestamp("ms")),
        "load": ROWS[:num_rows, 0],
        "temp": ROWS[:num_rows, 1].astype("f4"),
        "host": ["web1"] * num_rows,
        "rx": pa.array([2**64 - 1 - i for i in range(num_rows)], pa.uint64()),
        "price": [Decimal(i).scaleb(-2) for i in range(num_rows)],
        "level": pa.array([i % 3 for i in range(num_rows)]).dictionary_encode(),
        "buckets": [[1, 2]] * num_rows,
        "gap": pa.array([None if i == 7 else float(i) for i in range(num_rows)]),
        "none": pa.nulls(num_rows, pa.float64()),
    }


def saved(table, maker="new_file", chunk=None, **options):
    import pyarrow as pa

    file, table = io.BytesIO(), pa.table(table)
    with getattr(pa.ipc, maker)(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return file.getvalue()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"compression": "lz4"}, {"chunk": 1}, {"chunk": 200}])
@pytest.mark.usefixtures("arrow")
def test_columns_of_numbers_are_metrics_whatever_their_type(tmp_path, maker, options):
    read = Read(tmp_path, saved(columns(), maker, **options), Everything())
    assert read.format == "arrow"
    assert read.names == ["load", "temp", "rx", "price", "level", "gap"]
    unused = dict.fromkeys(("host", "buckets"), "not_numeric")
    assert read.ignored == unused | {"none": "empty", "time": "time"}
    assert read.rows.shape == (300, 6)
    np.testing.assert_array_equal(read.rows[:, 0], ROWS[:, 0])
    np.testing.assert_array_equal(read.rows[:, 1], ROWS[:, 1].astype("f4"))
    assert (read.rows[:, 2] == float(2**64)).all()
    np.testing.assert_allclose(read.rows[:, 3], np.arange(300) / 100, rtol=1e-15)
    assert read.rows[:, 4].tolist() == [i % 3 for i in range(300)]
    assert np.flatnonzero(np.isnan(read.rows[:, 5])).tolist() == [7]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_is_an_arrow_file_and_a_null_is_a_missing_cell(tmp_path, arrow, compression):
    feather = pytest.importorskip("pyarrow.feather")
    file = io.BytesIO()
    feather.write_feather(arrow.table({"a": [1.5, None, 3.5], "b": [1, 2, 3]}), file, compression=compression)
    read = Read(tmp_path, file.getvalue(), Everything())
    assert (read.format, read.names) == ("arrow", ["a", "b"])
    np.testing.assert_array_equal(Read(tmp_path, file.getvalue()).rows, [[1.5, 1], [np.nan, 2], [3.5, 3]])


@pytest.mark.parametrize("head", [b"ARROW1\0\0\xff\xff\xff\xff", b"\xff\xff\xff\xff\x10\0\0\0"])
def test_without_pyarrow_the_file_waits_and_the_package_is_named(tmp_path, monkeypatch, head):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ReaderMissing) as raised:
        Read(tmp_path, head)
    assert raised.value.code == "no_reader"
    assert "Arrow" in raised.value.message
    assert "python3-pyarrow" in raised.value.remedy


@pytest.mark.usefixtures("arrow")
def test_a_file_cut_anywhere_is_truncated(tmp_path):
    data = saved(columns(20))
    for size in (*range(9, len(data), 97), len(data) - 1):
        assert refusal(tmp_path, data[:size]).code == "truncated", size
    stream = saved(columns(20), "new_stream")
    assert refusal(tmp_path, stream[:-20]).code == "truncated"
    assert len(Read(tmp_path, stream[:-8], Everything()).rows) == 20  # without its mark it is whole


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.usefixtures("arrow")
def test_a_table_without_rows_or_with_equal_names_is_refused(tmp_path, maker):
    assert refusal(tmp_path, saved({"a": np.zeros(0)}, maker)).code == "no_rows"
    assert refusal(tmp_path, saved({"a": [1.0], "A ": [2.0]}, maker)).code == "ambiguous_columns"
    assert refusal(tmp_path, saved({"a": ["x"]}, maker)).code == "no_numeric"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.usefixtures("arrow")
def test_what_would_unpack_to_more_than_is_allowed_is_refused_unopened(tmp_path, monkeypatch, compression):
    data = saved({"a": np.zeros(2**17), "b": np.ones(2**17)}, compression=compression)
    monkeypatch.setattr(source, "SMALL_BYTES", 2**16)
    for limit in ("max_uncompressed_bytes", "max_unpack_ratio"):
        error = refusal(tmp_path, data, **{limit: 2**20 if "bytes" in limit else 1})
        assert error.code == "too_large"
        assert limit in error.remedy
    monkeypatch.setattr(arrowipc, "MAX_GROUP_BYTES", 2**20)
    error = refusal(tmp_path, data)
    assert (error.code, error.message[:7]) == ("too_large", "a batch")
    assert Read(tmp_path, saved({"a": np.zeros(2**17)}, chunk=1000)).rows.shape == (2**17, 1)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("arrow")
def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path, maker, seed):
    whole, choice = saved(columns(20), maker, compression="lz4" if seed else None), random.Random(seed)
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(choice.choice((1, 1, 3))):
            data[choice.randrange(9, len(data))] = choice.randrange(256)
        try:
            Read(tmp_path, bytes(data), Everything())
        except DataError:
            num_refused += 1
    assert num_refused > 50
