"""What is copied before it is read: formats that need it, what never fits, and a filesystem that is full."""

import io
import os
import tarfile

import numpy as np
import pytest
from reading import Read, refusal

from retraind.config import DataConfig
from retraind.errors import HostError
from retraind.worker.ingest import ingest
from retraind.worker.readers import spill

ROWS = np.random.default_rng(2).normal(size=(3000, 4))


def in_order(rows):
    return np.asarray(rows, order="F")


def npy(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def npz(rows):
    file = io.BytesIO()
    np.savez(file, rows)
    return file.getvalue()


def tar(rows):
    file, data = io.BytesIO(), npy(rows)
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("rows.npy")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def parquet(rows):
    table = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    file = io.BytesIO()
    table.write_table(arrow.table({f"m{index}": column for index, column in enumerate(rows.T)}), file)
    return file.getvalue()


FORMS = [lambda rows: npy(in_order(rows)), npz, tar, parquet]


class Facts:
    """A filesystem of 64 KB."""

    f_blocks, f_frsize = 64, 1000


@pytest.mark.parametrize("form", FORMS)
def test_what_can_never_fit_is_refused_before_it_is_copied(tmp_path, form, monkeypatch):
    data = form(ROWS)
    assert len(Read(tmp_path, data).rows) == 3000
    monkeypatch.setattr(os, "statvfs", lambda _: Facts)
    assert len(Read(tmp_path, data).rows) == 3000  # what memory holds needs no disk
    monkeypatch.setattr(spill, "MAX_IN_MEMORY_BYTES", 1000)
    error = refusal(tmp_path, data)
    assert (error.code, "64,000 in all" in error.message) == ("too_large", True)
    assert "state.dir" in error.remedy
    monkeypatch.setattr(Facts, "f_blocks", 0)  # a filesystem that does not tell
    assert len(Read(tmp_path, data).rows) == 3000


@pytest.mark.parametrize("form", FORMS)
def test_a_filesystem_that_is_full_now_is_the_hosts_fault(tmp_path, form, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill.tempfile, "SpooledTemporaryFile", lambda *_, **__: Full())
    (tmp_path / "data").write_bytes(form(ROWS))
    with pytest.raises(HostError) as raised:
        ingest([tmp_path / "data"], tmp_path, DataConfig(), lambda _: None)
    assert raised.value.code == "disk_full"
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
