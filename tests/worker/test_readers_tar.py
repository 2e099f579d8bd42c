"""Tar archives of files of one format: one dataset, in order of name, nothing of it written or followed."""

import bz2
import gzip
import io
import lzma
import random
import tarfile

import numpy as np
import pytest
from reading import Read, refusal

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.ingest import describe
from retraind.worker.readers import tar
from retraind.worker.readers.columns import choose_metrics
from retraind.worker.readers.rowlog import RowLog
from retraind.worker.readers.source import Source


def table(first, num_rows, header="a,b"):
    return "".join([header + "\n", *(f"{i},{i * 0.5}\n" for i in range(first, first + num_rows))]).encode()


def entry(name, content=b"", **attributes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def packed(*entries, form=tarfile.PAX_FORMAT):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


DAYS = (
    entry("logs/day-2.csv", table(40, 30)),
    entry("logs/day-1.csv", table(0, 40)),
    entry("logs/day-3.csv", table(70, 5)),
)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_are_read_one_after_the_other_in_order_of_name(tmp_path, pack, form):
    read = Read(tmp_path, pack(packed(*DAYS, form=form)))
    assert (read.format, read.names) == ("csv+tar", ["a", "b"])
    assert read.rows.tolist() == [[i, i * 0.5] for i in range(75)]


def test_it_is_one_dataset_with_its_problems_and_no_file_is_left(tmp_path):
    path = tmp_path / "week.tar.gz"
    bad = entry("logs/day-2.csv", table(40, 3) + b"x,1\n" + table(43, 27).partition(b"\n")[2])
    path.write_bytes(gzip.compress(packed(DAYS[1], bad)))
    dataset, _ = describe([path], DataConfig())
    assert (dataset.name, dataset.format, dataset.num_rows) == ("week.tar.gz", "csv+tar+gzip", 70)
    assert [(problem.reason, problem.text) for problem in dataset.problems] == [("not_a_number", "x")]
    assert list(tmp_path.iterdir()) == [path]


def test_every_row_of_every_member_is_answered_for_and_lines_go_on(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(
        packed(entry("1.csv", table(0, 3)), entry("2.csv", b"a,b\n5,6,7\n8,9\n"), entry("3.csv", table(9, 2)))
    )
    log, limits = RowLog(), DataConfig()
    taken = []
    with Source(path, limits) as source:
        from retraind.worker.readers import open_reader

        reader = open_reader(source, limits)
        names, _ = choose_metrics(reader.columns, limits)
        for rows in reader.rows(names, log):
            taken += log.take(rows)[0]
    assert [(row.line, row.reason) for row in taken] == [
        (2, ""), (3, ""), (4, ""), (6, "ragged"), (7, ""), (9, ""), (10, "")
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "npy", "csv-long"])
def test_any_format_can_be_packed(tmp_path, kind):
    def content(first):
        if kind == "jsonl":
            return "".join(f'{{"a": {i}, "b": {i}}}\n' for i in range(first, first + 9)).encode()
        if kind == "csv-long":
            return (
                "time,name,value\n" + "".join(f"{i},{n},{i}\n" for i in range(first, first + 9) for n in "ab")
            ).encode()
        file = io.BytesIO()
        np.save(file, np.arange(first, first + 9.0)[:, None].repeat(2, axis=1))
        return file.getvalue()

    read = Read(tmp_path, packed(entry("1", content(0)), entry("2", content(9))))
    assert read.format == kind + "+tar"
    assert read.rows.tolist() == [[i, i] for i in range(18)]


def test_directories_and_hidden_names_are_passed_over(tmp_path):
    folder = entry("./logs", type=tarfile.DIRTYPE)
    hidden = [entry("logs/._day-1.csv", b"\0\1"), entry(".git/config", b"[core]"), entry("./.DS_Store", b"\0")]
    read = Read(tmp_path, packed(folder, *hidden, entry("./logs/day-1.csv", table(0, 9))))
    assert len(read.rows) == 9


@pytest.mark.parametrize(
    ("strange", "words"),
    [
        (entry("x.csv", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "no plain file"),
        (entry("x.csv", type=tarfile.LNKTYPE, linkname="logs/day-1.csv"), "no plain file"),
        (entry("x.csv", type=tarfile.FIFOTYPE), "no plain file"),
        (entry("x.csv", type=tarfile.CHRTYPE, devmajor=1, devminor=3), "no plain file"),
        (entry("/etc/x.csv", table(0, 3)), "outside"),
        (entry("logs/../../x.csv", table(0, 3)), "outside"),
        (entry("x.npy", b"\x93NUMPY\x01\0"), "x.npy"),
        (entry("x.jsonl", b'{"a": 1, "b": 2}\n'), "jsonl, the first file of the archive is csv"),
        (entry("x.tar", packed(*DAYS)), "within an archive"),
        (entry("x.csv.gz", gzip.compress(table(0, 3))), "within another compression"),
        (entry("x.csv", b""), "0 bytes"),
        (entry("x.csv", table(0, 3, "a,c")), "metrics of the first file of the archive are missing: b"),
        (DAYS[0], "two files of the name"),
    ],
)
def test_what_is_not_more_of_the_same_refuses_the_archive(tmp_path, strange, words):
    error = refusal(tmp_path, packed(*DAYS, strange))
    assert words in error.message
    assert error.remedy
    assert error.code in {"unsupported_format", "truncated", "empty", "missing_columns", "malformed"}


def test_an_archive_of_nothing_and_one_of_too_much_are_refused(tmp_path, monkeypatch):
    assert refusal(tmp_path, packed(entry("logs", type=tarfile.DIRTYPE))).code == "empty"
    monkeypatch.setattr(tar, "MAX_ENTRIES", 2)
    assert refusal(tmp_path, packed(*DAYS)).code == "too_large"


def test_an_archive_that_is_cut_or_goes_on_behind_its_end_is_refused(tmp_path):
    data = packed(*DAYS)
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    for size in (513, 1024, 1500, end - 300, end):
        assert refusal(tmp_path, data[:size]).code == "truncated", size
    assert len(Read(tmp_path, data[: end + 512]).rows) == 75
    assert "behind its end" in refusal(tmp_path, data + data).message


def test_headers_that_lie_cost_neither_time_nor_memory(tmp_path):
    long_name = entry("n" * 300, table(0, 3))
    data = bytearray(packed(long_name, form=tarfile.GNU_FORMAT))
    for size in (b"77777777777\0", b"\x80" + (2**62).to_bytes(11, "big"), b"\xff" + b"\xff" * 10 + b"\x00"):
        data[124:136] = size
        checksum = 256 + sum(data[:148]) + sum(data[156:512])
        data[148:156] = b"%06o\0 " % checksum
        assert refusal(tmp_path, bytes(data)).code in {"malformed", "truncated"}
    plain = bytearray(packed(DAYS[0], form=tarfile.GNU_FORMAT))
    plain[124:136] = b"\xff" * 10 + b"\xfe\x00"
    plain[148:156] = b"%06o\0 " % (256 + sum(plain[:148]) + sum(plain[156:512]))
    refused = refusal(tmp_path, bytes(plain))
    assert refused.code == "malformed"
    # Newer releases of Python's own reader notice it before ours does.
    assert "negative" in refused.message or "invalid" in refused.message


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_damaged_archive_is_read_or_refused_and_nothing_else(tmp_path, form):
    choice = random.Random(form)
    whole = packed(*DAYS, entry("n" * (90 if form == tarfile.USTAR_FORMAT else 120), table(75, 3)), form=form)
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        start = choice.randrange(len(data) // 512) * 512
        data[start + choice.randrange(512)] = choice.randrange(256)
        try:
            Read(tmp_path, bytes(data))
        except DataError:
            num_refused += 1
    assert num_refused > 50


def test_what_packed_members_come_to_is_bounded_for_the_archive(tmp_path, monkeypatch):
    monkeypatch.setattr("retraind.worker.readers.source.SMALL_BYTES", 2**20)
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(100_000))
    members = [entry(f"{day}.npz", file.getvalue()) for day in range(3)]
    assert len(Read(tmp_path, packed(members[0]), max_unpack_ratio=50).rows) == 100_000
    error = refusal(tmp_path, packed(*members), max_unpack_ratio=50)
    assert (error.code, error.message[:5]) == ("too_large", "1.npz")
