"""Influx line protocol."""

import numpy as np
import pytest
from reading import Read, refusal

BASE = 1_717_163_790


def points(num=10, unit=10**9):
    lines = ["# a comment, with = signs"]
    for i in range(num):
        stamp = (BASE + 10 * i) * unit
        lines += [
            f"cpu,host=web1,cpu=cpu0 usage_user={i}.5,n={i}i,big=18446744073709551615u {stamp}",
            rf'disk\ io,path=/a\,b\=c,host=web1 free={-i}e3,note="a \"b\", c=d {i}",up=true,ok=F {stamp}',
        ]
    return "".join(line + "\n" for line in lines).encode()


def test_a_field_is_a_series_by_measurement_and_tags_in_order_of_name(tmp_path):
    read = Read(tmp_path, points())
    assert read.format == "influx"
    assert read.names == [
        "cpu,cpu=cpu0,host=web1.big",
        "cpu,cpu=cpu0,host=web1.n",
        "cpu,cpu=cpu0,host=web1.usage_user",
        "disk io,host=web1,path=/a,b=c.free",
    ]
    texts = ("note", "ok", "up")
    assert read.ignored == {f"disk io,host=web1,path=/a,b=c.{name}": "not_numeric" for name in texts}
    assert read.rows.tolist() == [[2.0**64, i, i + 0.5, -i * 1e3] for i in range(10)]


def test_tags_may_stand_in_any_order(tmp_path):
    lines = [f"m,{'a=1,b=2' if i % 2 else 'b=2,a=1'} v={i} {BASE + i}" for i in range(10)]
    read = Read(tmp_path, "\n".join([*lines, ""]).encode())
    assert read.names == ["m,a=1,b=2.v"]
    assert read.rows.tolist() == [[i] for i in range(10)]


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_the_magnitude_of_a_time_stamp_tells_its_precision(tmp_path, unit):
    assert len(Read(tmp_path, points(unit=unit)).rows) == 10


def test_a_last_line_without_its_end_may_be_cut_and_is_not_used(tmp_path):
    read = Read(tmp_path, points()[:-4])
    assert (len(read.rows), read.dropped) == (10, {})
    assert np.argwhere(np.isnan(read.rows)).tolist() == [[9, 3]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cpu usage=1", "no time stamp"),
        (f"cpu usage=1 {BASE}", "in seconds"),
        (f"cpu usage=1 {BASE}.5", "no line"),
        (f"cpu 1 {BASE}", "no line"),
        ("cpu", "no line"),
        (f"cpu,host usage=1 {BASE}", "no line"),
        (f'cpu usage="a {BASE}', "no line"),
        (f"cpu usage=one {BASE * 10**9}", "none of Influx"),
        (f"cpu usage=1.5i {BASE * 10**9}", "none of Influx"),
        (f"cpu usage=1_0 {BASE * 10**9}", "none of Influx"),
        (f"cpu usage=NaN {BASE * 10**9}", "none of Influx"),
        (f"cpu,a=1,a=2 usage=1 {BASE * 10**9}", "twice"),
        (f'cpu,host=web1,cpu=cpu0 n="x" {BASE * 10**9}', "number in one place"),
        (f"cpu,host=web1,cpu=cpu0 n=7i {BASE * 10**9}", "two values"),
        (f"cpu n=1 {'9' * 30}", "out of range"),
        ("cpu n=1" + " " * 1_000_000 + "x", "no line"),
        ("a," * 400_000, "no line"),
        ("a=" * 400_000 + " b=1=1", "no line"),
        ("cpu n=1" + ",n=1" * 200_000 + ",x", "no line"),
        (r"c\,\ " * 200_000, "no line"),
    ],
)
def test_a_line_that_can_not_be_used_is_refused_with_its_place(tmp_path, line, words):
    error = refusal(tmp_path, points() + f"{line}\n".encode() + points()[:0])
    assert (error.code, error.line) == ("malformed", 22)
    assert words in error.message
    assert error.remedy


def test_a_line_longer_than_the_head_is_known_too(tmp_path):
    fields = ",".join(f"field_{k}={k}" for k in range(1000))
    read = Read(tmp_path, "".join(f"m {fields} {BASE + i}\n" for i in range(3)).encode())
    assert read.rows.shape == (3, 1000)


@pytest.mark.parametrize("data", [b"a,b c=1\n1,2\n3,4\n", b"x=1 y\n1\n2\n"])
def test_what_only_looks_like_line_protocol_is_delimited_text(tmp_path, data):
    assert Read(tmp_path, data).format == "csv"
