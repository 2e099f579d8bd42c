"""Compressed files: every codec by its first bytes, all members, and the same limits and errors for each."""

import bz2
import gzip
import lzma
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
from reading import Read

from retraind.config import DataConfig
from retraind.errors import DataError, ReaderMissing
from retraind.worker.ingest import describe
from retraind.worker.readers.source import Source

TEXT = b"".join(b"%d,%d\n" % (i, i * i) for i in range(50_000))
CODECS = ["gzip", "bz2", "xz", "zstd"]


def pack(codec, data):
    if codec != "zstd":
        return {"gzip": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[codec](data)
    if sys.version_info >= (3, 14):
        zstd = import_module("compression.zstd")
        return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(data)


def read_all(path, limits, step=70_000):
    with Source(path, limits) as source:
        content = b"".join(iter(lambda: source.read(step), b""))
        source.finish()
        return content, source


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("step", [1, 70_000])
def test_all_members_are_read_and_zero_padding_is_not(tmp_path, codec, step):
    path = tmp_path / "looks-plain.csv"
    text = TEXT if step > 1 else TEXT[:3000]
    path.write_bytes(pack(codec, text[:1000]) + pack(codec, b"") + pack(codec, text[1000:]) + b"\0" * 1000)
    content, source = read_all(path, DataConfig(), step)
    assert content == text
    assert source.compression == codec


@pytest.mark.parametrize("codec", CODECS)
def test_many_short_members_are_read(tmp_path, codec):
    path = tmp_path / "a"
    path.write_bytes(b"".join(pack(codec, TEXT[i : i + 100]) for i in range(0, 20_000, 100)))
    assert read_all(path, DataConfig())[0] == TEXT[:20_000]


def flipped(raw):
    return raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 0xFF]) + raw[len(raw) // 2 + 1 :]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw[: len(raw) // 2], "truncated"),
        (lambda raw: raw[:7], "truncated"),
        (lambda raw: raw + raw[:20], "truncated"),
        (flipped, "malformed"),
        (lambda raw: raw + b"rubbish behind the last member", "malformed"),
    ],
)
def test_a_spoilt_file_is_refused(tmp_path, codec, spoil, code):
    path = tmp_path / "a"
    path.write_bytes(spoil(pack(codec, TEXT)))
    with pytest.raises(DataError) as raised:
        read_all(path, DataConfig())
    assert raised.value.code == code
    assert codec in raised.value.message
    assert raised.value.remedy


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, codec):
    path = tmp_path / "bomb"
    path.write_bytes(pack(codec, b"1" * (100 * 2**20)))
    with Source(path, DataConfig(max_uncompressed_bytes=2**20)) as source, pytest.raises(DataError) as raised:
        source.read(100 * 2**20)
    assert raised.value.code == "too_large"


@pytest.mark.parametrize("codec", CODECS)
def test_what_unpacks_to_far_more_than_its_size_is_refused_if_it_is_large(tmp_path, codec, monkeypatch):
    path = tmp_path / "zeros.csv"
    path.write_bytes(pack(codec, b"0,0\n" * 500_000))
    assert len(read_all(path, DataConfig())[0]) == 2_000_000
    monkeypatch.setattr("retraind.worker.readers.source.SMALL_BYTES", 2**20)
    with pytest.raises(DataError) as raised:
        read_all(path, DataConfig())
    assert raised.value.code == "too_large"
    assert "200 times" in raised.value.message
    assert "max_unpack_ratio" in raised.value.remedy
    assert len(read_all(path, DataConfig(max_unpack_ratio=10**6))[0]) == 2_000_000


def test_a_hundred_million_rows_of_nothing_in_a_small_file_are_refused(tmp_path):
    path = tmp_path / "zeros.csv.gz"
    path.write_bytes(gzip.compress(b"0,0\n" * 2**20) * 100)
    assert path.stat().st_size < 500_000
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig())
    assert raised.value.code == "too_large"
    assert raised.value.message.startswith("zeros.csv.gz has 4")


def test_memory_for_unpacking_is_bounded_whatever_a_file_asks_for(tmp_path):
    path = tmp_path / "a.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**20}]
    raw = bytearray(lzma.compress(TEXT, filters=filters))
    assert raw[14:17] == b"\x21\x01\x10"  # LZMA2, one byte of properties, 1 MiB
    raw[16] = 0x24  # 1 GiB
    raw[20:24] = import_module("zlib").crc32(raw[12:20]).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(DataError) as raised:
        read_all(path, DataConfig())
    assert raised.value.code == "malformed"
    assert "emory" in raised.value.message


@pytest.mark.parametrize("codec", CODECS)
def test_the_format_names_the_compression(tmp_path, codec):
    path = tmp_path / "a.csv"
    path.write_bytes(pack(codec, b"a,b\n" + TEXT))
    dataset, _ = describe([path], DataConfig())
    assert dataset.format == f"csv+{codec}"
    assert dataset.num_rows == 50_000


@pytest.mark.parametrize("codec", CODECS)
def test_what_unpacks_to_nothing_is_empty(tmp_path, codec):
    with pytest.raises(DataError) as raised:
        Read(tmp_path, pack(codec, b""))
    assert raised.value.code == "empty"


def test_zstd_without_a_library_waits_for_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ReaderMissing) as raised:
        Read(tmp_path, b"\x28\xb5\x2f\xfd\x04\x00")
    assert raised.value.code == "no_reader"
    assert "python3-zstandard" in raised.value.remedy


@pytest.mark.parametrize(("module", "codec"), [("bz2", "bz2"), ("lzma", "xz")])
def test_a_python_without_a_codec_reads_all_but_that(tmp_path, monkeypatch, module, codec):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ReaderMissing) as raised:
        Read(tmp_path, pack(codec, b"a\n1\n"))
    assert raised.value.code == "no_reader"
    assert Read(tmp_path, b"a\n1\n").rows.tolist() == [[1]]


@pytest.mark.skipif(find_spec("zstandard") is None, reason="needs the module zstandard")
def test_the_module_zstandard_never_gives_more_than_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = tmp_path / "a.zst"
    path.write_bytes(import_module("zstandard").ZstdCompressor().compress(b"7" * 50_000_000))
    sizes = []
    with Source(path, DataConfig()) as source:
        while part := source._unpacker.read(1000_000):
            sizes.append(len(part))
    assert sum(sizes) == 50_000_000
    assert max(sizes) <= 1000_000
