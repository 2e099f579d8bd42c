"""The .npy format, and what is recognised as another one."""

import gzip
import io
import pickle
import zipfile

import numpy as np
import pytest
from reading import Read, refusal, with_gaps

from retraind.worker.readers import npy

ROWS = np.random.default_rng(5).normal(size=(1000, 32)).astype("<f4").astype(np.float64)


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "array",
    [ROWS.astype("<f4"), ROWS.astype(">f4"), ROWS, np.asfortranarray(ROWS.astype(">f8")), np.asfortranarray(ROWS)],
)
@pytest.mark.parametrize("block_bytes", [1000, 100_000, npy.BLOCK_BYTES])
def test_the_same_table_is_read_whatever_its_layout(tmp_path, monkeypatch, array, pack, block_bytes):
    monkeypatch.setattr(npy, "BLOCK_BYTES", block_bytes)
    read = Read(tmp_path, pack(saved(array)))
    assert read.names == [f"column_{k}" for k in range(32)]
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize("dtype", ["<i8", ">u8", "<u2", "|i1", "<f2"])
def test_integers_and_half_floats_are_exact(tmp_path, dtype):
    info = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    array = np.array([[info.max, 1], [info.min, 2], [3, 3]], dtype=dtype)
    read = Read(tmp_path, saved(array))
    assert read.rows.tolist() == [[float(cell) for cell in row] for row in array.tolist()]


def test_values_that_are_not_finite_are_missing_cells_and_rows_of_nothing_else_are_dropped(tmp_path):
    array = ROWS.copy()
    array[3, 5], array[7, 2], array[7, 9], array[9, 0] = np.nan, np.inf, np.nan, 1e300
    array[20], array[21] = np.nan, -np.inf
    array[:, 4] = np.nan
    read = Read(tmp_path, saved(array))
    assert read.ignored == {"column_4": "empty"}
    assert read.dropped == {"missing": 1, "non_finite": 1}
    assert [p[:3] for p in read.problems] == [(21, 1, "missing"), (22, 1, "non_finite")]
    assert (read.num_gaps, read.num_non_finite) == (4, 2)
    gaps = with_gaps(ROWS, (3, 5), (7, 2), (7, 9), (9, 0))
    np.testing.assert_array_equal(read.rows, np.delete(np.delete(gaps, [20, 21], axis=0), 4, axis=1))


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_signalling_nan_is_a_missing_cell(tmp_path, order):
    array = np.array(ROWS, dtype="<f4", order=order)
    array.view("<u4")[6, 1] = 0x7F800001
    read = Read(tmp_path, saved(array))
    np.testing.assert_array_equal(read.rows, with_gaps(ROWS, (6, 1)))


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(np.float64).max, reason="needs a wider long double")
def test_a_long_double_beyond_float64_is_not_finite(tmp_path):
    array = ROWS.astype(np.longdouble)
    array[6, 1] = np.longdouble("1e4000")
    read = Read(tmp_path, saved(array))
    assert (read.dropped, read.num_gaps, read.num_non_finite) == ({}, 1, 1)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_an_object_array_is_refused_and_nothing_runs(tmp_path):
    marker = tmp_path / "marker"
    data = saved(np.array([[Hostile(marker), 1]], dtype=object), allow_pickle=True)
    assert refusal(tmp_path, data).code == "object_dtype"
    assert refusal(tmp_path, pickle.dumps(Hostile(marker))).code == "unsupported_format"
    assert not marker.exists()


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_a_file_of_python_2_is_read(tmp_path):
    data = header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3L, 2L), }") + np.arange(6.0).tobytes()
    assert Read(tmp_path, data).rows.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (saved(ROWS)[:-5], "truncated"),
        (saved(np.asfortranarray(ROWS))[:-5], "truncated"),
        (saved(ROWS) + b"xx", "malformed"),
        (saved(np.asfortranarray(ROWS)) + b"xx", "malformed"),
        (gzip.compress(saved(ROWS))[:-20], "truncated"),
        (saved(ROWS.T), "shape"),
        (saved(ROWS[:, 0]), "shape"),
        (saved(ROWS.reshape(10, 100, 32)), "shape"),
        (saved(np.float64(1.0)), "shape"),
        (saved(ROWS[:, :0]), "shape"),
        (saved(ROWS[:0]), "no_rows"),
        (saved(np.zeros(5, dtype=[("a", "f8"), ("b", "f4")])), "unsupported_format"),
        (b"\x93NUMPY\x03\x00" + b"x" * 100, "unsupported_format"),
        (saved(np.zeros((5, 2), dtype=complex)), "unsupported_format"),
        (saved(np.array([["a", "b"]] * 5)), "unsupported_format"),
        (saved(np.zeros((5, 2), dtype="M8[s]")), "unsupported_format"),
        (saved(np.zeros((5000, 4097), dtype="i1")), "too_many_columns"),
        (header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (9, 2), }"), "truncated"),
        (header(b"{'descr': '<f8', 'shape': (9, 2), }"), "malformed"),
        (header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-9, 2), }"), "shape"),
        # With a negative size nothing may be read: it would look like an error of the disk.
        (header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, -3), }") + b"x" * 96, "shape"),
        (header(b"{'descr': '<f8', 'fortran_order': True, 'shape': (2, -3), }") + b"x" * 96, "shape"),
        (header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -9), }"), "shape"),
        (header(b"{'descr': '<f8', 'fortran_order': True, 'shape': (-2, -9), }"), "shape"),
        (header(b"__import__('os').abort()"), "malformed"),
        (header(b"(" * 5000), "malformed"),
        (b"\x93NUMPY\x01", "malformed"),
        (b"\x93NUMPY\x09\x00" + b"x" * 100, "unsupported_format"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(tmp_path, data, code):
    assert refusal(tmp_path, data).code == code


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("a.csv", "a,b\n1,2\n")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (archive(), "zip"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "zstd within another compression"),
        (b"BZh91AY&SY", "bz2 within another compression"),
        (b"\xfd7zXZ\x00\x00", "xz within another compression"),
        (b"FEA1\x00\x00", "Feather of version 1"),
        (pickle.dumps([1, 2]), "pickle"),
        (gzip.compress(b"a\n1\n"), "gzip within another compression"),
        (b"1,2\n\0\0\0\0", "binary"),
    ],
)
def test_a_foreign_format_is_refused_by_its_name(tmp_path, data, named):
    error = refusal(tmp_path, gzip.compress(data))
    assert error.code == "unsupported_format"
    assert named in error.message
    assert "CSV" in error.remedy


@pytest.mark.parametrize("data", [b"", gzip.compress(b"")])
def test_a_file_of_no_bytes_is_empty(tmp_path, data):
    assert refusal(tmp_path, data).code == "empty"
