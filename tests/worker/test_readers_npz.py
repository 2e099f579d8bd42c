"""The .npz archive."""

import gzip
import io
import zipfile

import numpy as np
import pytest
from reading import Read, refusal

from retraind.worker.readers import npy, npz, source

ROWS = np.random.default_rng(5).normal(size=(1000, 8))


def saved(*arrays, save=np.savez, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("array", [ROWS, np.asfortranarray(ROWS), ROWS.astype(">f8")])
def test_one_array_of_two_dimensions_is_the_table(tmp_path, save, array):
    read = Read(tmp_path, saved(array, save=save))
    assert read.format == "npz"
    assert read.names == [f"column_{k}" for k in range(8)]
    np.testing.assert_array_equal(read.rows, ROWS)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("block_values", [7, npz.BLOCK_VALUES])
def test_arrays_of_one_length_are_columns_by_their_names(tmp_path, monkeypatch, save, block_values):
    monkeypatch.setattr(npz, "BLOCK_VALUES", block_values)
    monkeypatch.setattr(npy, "BLOCK_BYTES", 999)
    columns = {
        "load": ROWS[:, 0],
        "host": np.array(["web1"] * 1000),
        "rx": np.arange(1000, dtype=">u4"),
        "time": np.arange(1000).astype("M8[s]"),
        "temp": ROWS[:, 1].astype("<f4"),
        "up": np.ones(1000, bool),
    }
    read = Read(tmp_path, saved(save=save, **columns))
    assert read.names == ["load", "rx", "temp"]
    assert read.ignored == dict.fromkeys(("host", "time", "up"), "not_numeric")
    np.testing.assert_array_equal(read.rows, np.stack([ROWS[:, 0], np.arange(1000), columns["temp"]], axis=1))


def test_one_array_of_one_dimension_is_one_column(tmp_path):
    read = Read(tmp_path, saved(load=np.arange(5)))
    assert read.names == ["load"]
    assert read.rows.tolist() == [[0], [1], [2], [3], [4]]


def test_a_cell_that_is_not_finite_is_missing(tmp_path):
    read = Read(tmp_path, saved(a=np.array([1, np.nan, 3]), b=np.array([1, 2, np.inf])))
    assert (read.dropped, read.num_non_finite) == ({}, 1)
    np.testing.assert_array_equal(read.rows, [[1, 1], [np.nan, 2], [3, np.nan]])


class Marker:
    """Leaves a trace if it is ever unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("shape", [1, 2])
def test_an_object_array_is_refused_and_nothing_runs(tmp_path, shape):
    array = np.empty((5,) * shape, dtype=object)
    array[...] = Marker(tmp_path / "ran")
    error = refusal(tmp_path, saved(a=array))
    assert error.code == "object_dtype"
    assert not (tmp_path / "ran").exists()


def with_member(name, data=b""):
    file = io.BytesIO(saved(a=np.arange(5)))
    with zipfile.ZipFile(file, "a") as target:
        target.writestr(name, data)
    return file.getvalue()


def damaged():
    data = bytearray(saved(a=ROWS[:, 0]))
    data[4000] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (saved(a=ROWS, b=ROWS), "shape", "a of shape (1000, 8)"),
        (saved(a=ROWS, b=ROWS[:, 0]), "shape", "b of shape (1000,)"),
        (saved(a=np.arange(5), b=np.arange(6)), "shape", "b of shape (6,)"),
        (saved(np.zeros((5, 2, 2))), "shape", "(5, 2, 2)"),
        (saved(a=np.zeros(())), "shape", "()"),
        (saved(**{f"c{k}": np.arange(3) for k in range(5)}), "shape", "(3, 5)"),
        (saved(a=np.zeros(0), b=np.zeros(0)), "no_rows", "(0, 2)"),
        (saved(a=np.array(["x", "y"])), "no_numeric", "a"),
        (saved(a=np.arange(5), A=np.arange(5)), "ambiguous_columns", "share a name"),
        (saved(ROWS)[:-300], "truncated", "no end"),
        (damaged(), "malformed", "damaged"),
        (with_member("b.txt", b"x"), "unsupported_format", "b.txt"),
        (with_member("b.npy", b"x"), "malformed", "header"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, data, code, words):
    error = refusal(tmp_path, data)
    assert error.code == code
    assert words in error.message


def test_what_an_archive_unpacks_to_is_bounded(tmp_path, monkeypatch):
    data = saved(np.zeros((100_000, 8)), save=np.savez_compressed)
    assert refusal(tmp_path, data, max_uncompressed_bytes=1_000_000).code == "too_large"
    monkeypatch.setattr(source, "SMALL_BYTES", 2**20)
    assert "200 times" in refusal(tmp_path, data).message
    # An archive within another compression: each may pack by 200, and both together may not either.
    loose = saved(np.tile(np.arange(1000.0), (800, 1)).T, save=np.savez_compressed)
    assert Read(tmp_path, loose).rows.shape == (1000, 800)
    assert "200 times" in refusal(tmp_path, gzip.compress(loose)).message
