"""Source: safe opening, gzip, digest and the proof that a file stayed the same."""

import errno
import gzip
import hashlib
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from retraind.config import DataConfig
from retraind.errors import DataError, DatasetChanged, HostError, IntakeError, RetraindError
from retraind.printable import printable
from retraind.worker.readers.source import Source

TEXT = b"".join(b"%d,%d\n" % (i, i * i) for i in range(50_000))
LIMITS = DataConfig()


def read_all(path, limits=LIMITS, beat=lambda _: None, step=70_000):
    with Source(path, limits, beat) as source:
        content = b"".join(iter(lambda: source.read(step), b""))
        source.finish()
        return content, source


def test_content_and_digest_are_of_the_whole_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    content, source = read_all(path)
    assert content == TEXT
    assert source.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert source.num_bytes == len(TEXT)


def test_finish_hashes_what_was_not_read(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(TEXT * 10)
    with Source(path, LIMITS) as source:
        assert source.read(10) == TEXT[:10]
        source.finish()
        assert source.sha256 == hashlib.sha256(TEXT * 10).hexdigest()


def test_peek_does_not_take(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    with Source(path, LIMITS) as source:
        assert source.peek(100) == TEXT[:100]
        assert source.read(100) == TEXT[:100]
        assert source.read(5) == TEXT[100:105]


@pytest.mark.parametrize("padding", [b"", b"\0" * 1000, b"\0" * 3_000_000])
def test_all_gzip_members_are_read_and_zero_padding_is_not(tmp_path, padding):
    path = tmp_path / "looks-plain.csv"
    raw = gzip.compress(TEXT[:1000]) + gzip.compress(b"") + gzip.compress(TEXT[1000:]) + padding
    path.write_bytes(raw)
    content, source = read_all(path)
    assert content == TEXT
    assert source.compression == "gzip"
    assert source.sha256 == hashlib.sha256(raw).hexdigest()


def flipped(raw):
    return raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 0xFF]) + raw[len(raw) // 2 + 1 :]


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw[:-8], "truncated"),
        (lambda raw: raw[: len(raw) // 2], "truncated"),
        (lambda raw: raw[:5], "truncated"),
        (lambda raw: raw[:2], "truncated"),
        (lambda raw: raw + raw[:20], "truncated"),
        (flipped, "malformed"),
        (lambda raw: raw[:-6] + b"\0\0" + raw[-4:], "malformed"),  # the checksum
        (lambda raw: raw + b"rubbish behind the last member", "malformed"),
    ],
)
def test_a_spoilt_gzip_file_is_refused(tmp_path, spoil, code):
    path = tmp_path / "a.gz"
    path.write_bytes(spoil(gzip.compress(TEXT)))
    with pytest.raises(DataError) as raised:
        read_all(path)
    assert raised.value.code == code


@pytest.mark.parametrize(("limit", "is_allowed"), [(len(TEXT), True), (len(TEXT) - 1, False)])
def test_max_bytes_bounds_the_file(tmp_path, limit, is_allowed):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    if is_allowed:
        assert read_all(path, DataConfig(max_bytes=limit))[0] == TEXT
        return
    with pytest.raises(DataError) as raised:
        read_all(path, DataConfig(max_bytes=limit))
    assert raised.value.code == "too_large"


def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.gz"
    packer = zlib.compressobj(9, wbits=31)
    path.write_bytes(b"".join(packer.compress(b"1" * 2**20) for _ in range(100)) + packer.flush())
    with Source(path, DataConfig(max_uncompressed_bytes=2**20)) as source, pytest.raises(DataError) as raised:
        source.read(100 * 2**20)
    assert raised.value.code == "too_large"
    assert source.num_bytes <= path.stat().st_size


def make_fifo(path):
    os.mkfifo(path)


def make_link(path):
    target = path.with_name("target.csv")
    target.write_bytes(TEXT)
    path.symlink_to(target)


def make_loop(path):
    path.symlink_to(path)


def make_socket(path):
    listener = socket.socket(socket.AF_UNIX)
    directory = os.getcwd()
    os.chdir(path.parent)  # the address has at most 107 bytes
    try:
        listener.bind(path.name)
    finally:
        os.chdir(directory)
        listener.close()


def make_directory_of_two(path):
    path.mkdir()
    (path / "a").write_bytes(TEXT)
    (path / "b").write_bytes(TEXT)


def make_nested_directory(path):
    (path / "inner").mkdir(parents=True)


def make_link_in_directory(path):
    path.mkdir()
    (path / "a.csv").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "make",
    [
        make_fifo,
        make_link,
        make_loop,
        make_socket,
        make_directory_of_two,
        make_nested_directory,
        make_link_in_directory,
    ],
)
def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path, make):
    path = tmp_path / "x.csv"
    make(path)
    with pytest.raises(IntakeError) as raised:
        Source(path, LIMITS)
    assert raised.value.code == "not_regular"


def test_a_file_that_is_gone_is_vanished(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "gone.csv", tmp_path / "empty"):
        with pytest.raises(IntakeError) as raised:
            Source(path, LIMITS)
        assert raised.value.code == "vanished"


def test_the_one_file_of_a_directory_is_the_dataset_whatever_its_name(tmp_path):
    name = b"n\xff\xc3\xa4 \n\x1b[31m.csv"
    with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
        file.write(TEXT)
    content, source = read_all(tmp_path)
    assert content == TEXT
    assert source.name == "n\\xff\xe4 \\n\\x1b[31m.csv"
    assert source.name.isprintable()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [(b"\xff\xfe", "\\xff\\xfe"), ("\udcff", "\\xff"), ("\ud800", "\\ud800"), ("a\tb\x7f", "a\\tb\\x7f"), ("ü", "ü")],
)
def test_printable_escapes_what_no_log_can_hold(raw, shown):
    assert printable(raw) == shown


def test_a_file_that_may_not_be_read_is_the_hosts_fault(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(HostError) as raised:
            Source(path, LIMITS)
    finally:
        os.seteuid(user)
    assert raised.value.code == "unreadable"


def test_an_io_error_while_reading_is_the_hosts_fault(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)

    def failing_read(fd, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", failing_read)
        with pytest.raises(HostError) as raised:
            Source(path, LIMITS)
    assert raised.value.code == "host_io"


def append_to(path):
    with path.open("ab") as file:
        file.write(b"1,2\n")


def touch(path):
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [append_to, touch])
def test_a_file_that_changes_while_it_is_read_is_found_out(tmp_path, change):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    with pytest.raises(DatasetChanged):
        read_all(path, beat=lambda _: change(path))


def test_a_fault_that_a_writer_explains_is_reported_as_a_change(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT)[:-10])
    with pytest.raises(DatasetChanged), Source(path, LIMITS) as source:
        append_to(path)
        source.read(len(TEXT) + 1)


def test_no_descriptor_is_left_open(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    os.mkfifo(tmp_path / "fifo")
    before = os.listdir("/proc/self/fd")
    for attempt in (path, tmp_path / "fifo", tmp_path, tmp_path / "none"):
        try:
            read_all(attempt, DataConfig(max_bytes=1024))
        except RetraindError:
            continue
        pytest.fail(f"{attempt} was read")
    assert os.listdir("/proc/self/fd") == before


def test_reading_a_dataset_loads_no_torch(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(TEXT)
    program = (
        "import sys; from pathlib import Path; from retraind.config import DataConfig; "
        "from retraind.worker import ingest; ingest.describe([Path(sys.argv[1])], DataConfig()); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, Path(path)], check=False, timeout=120).returncode == 0
