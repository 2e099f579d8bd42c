"""Every format gives an answer for each of its rows, in one order, with the time where the format knows it."""

import io
import json

import numpy as np
import pytest

from retraind.config import DataConfig
from retraind.worker.readers import open_reader
from retraind.worker.readers.rowlog import RowLog
from retraind.worker.readers.source import Source

START = 1_767_225_600  # 2026-01-01T00:00:00Z


def series(number):
    """Lines of two series whose order is not that of time; the last but one has a hole."""
    order = sorted(range(number), key=lambda i: (i % 2, -i))
    return [(i, name) for i in order for name in ("a", "b") if (i, name) != (number - 2, "b")]


def prometheus():
    return "".join(f"{name} {i + (name == 'b') * 100} {(START + 15 * i) * 1000}\n" for i, name in series(6)).encode()


def influx():
    return "".join(f"{name} v={i + (name == 'b') * 100} {START + 15 * i}\n" for i, name in series(6)).encode()


def json_array():
    rows = [{"a": i, "b": None if i == 4 else i + 100} for i in range(6)]
    return json.dumps(rows).encode()


def archive():
    file = io.BytesIO()
    b = np.arange(100.0, 106.0)
    b[4] = np.nan
    np.savez(file, a=np.arange(6.0), b=b)
    return file.getvalue()


def parquet():
    arrow = pytest.importorskip("pyarrow")
    file = io.BytesIO()
    table = arrow.table({"a": list(range(6)), "b": [100, 101, 102, 103, None, 105]})
    pytest.importorskip("pyarrow.parquet").write_table(table, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "has_times"),
    [(prometheus, True), (influx, True), (json_array, False), (archive, False), (parquet, False)],
)
def test_each_row_has_its_place_its_reason_and_its_time(tmp_path, make, has_times):
    (tmp_path / "data").write_bytes(make())
    log, rows, blocks = RowLog(), [], []
    with Source(tmp_path / "data", DataConfig()) as source:
        reader = open_reader(source, DataConfig())
        names = [column.name for column in reader.columns if column.kind == "number"]
        for block in reader.rows(names, log):
            told, rows_ND = log.take(block)
            rows += told
            blocks.append(rows_ND)
        source.finish()
    rows_ND = np.concatenate(blocks)
    assert len(rows) == len(rows_ND) == 6
    assert [row.reason for row in rows] == [""] * 6
    np.testing.assert_array_equal(rows_ND, [[i, np.nan if i == 4 else i + 100] for i in range(6)])
    assert [row.line for row in rows] == sorted({row.line for row in rows})
    times = [f"2026-01-01T00:0{15 * i // 60}:{15 * i % 60:02d}.000Z" for i in range(6)]
    assert [row.label for row in rows] == (times if has_times else [""] * 6)


def test_a_row_without_any_value_keeps_its_place_as_well(tmp_path):
    text = b"a,b\n" + b"1,2\n" * 5 + b"inf,N/A\n,\n3,inf\n4,x\n"
    (tmp_path / "data").write_bytes(text)
    log = RowLog()
    with Source(tmp_path / "data", DataConfig()) as source:
        [(rows, rows_ND)] = [log.take(block) for block in open_reader(source, DataConfig()).rows(["a", "b"], log)]
    assert [(row.line, row.reason) for row in rows[5:]] == [
        (7, "non_finite"), (8, "missing"), (9, ""), (10, "not_a_number"),
    ]  # fmt: skip
    nan = np.nan
    np.testing.assert_array_equal(rows_ND[4:], [[1, 2], [nan, nan], [nan, nan], [3, nan], [nan, nan]])
