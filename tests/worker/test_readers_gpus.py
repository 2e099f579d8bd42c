"""Logs of several GPUs by nvidia-smi: one row a time, a column for each GPU and metric."""

import numpy as np
import pytest
from reading import Read, refusal

HEADER = "timestamp, index, name, pstate, utilization.gpu [%], memory.used [MiB], fan.speed [%]"


def record(second, gpu, *, milliseconds=0, utilization=None, memory="500 MiB"):
    stamp = f"2026/03/01 10:{second // 60:02d}:{second % 60:02d}.{milliseconds:03d}"
    utilization = f"{second + 50 * gpu} %" if utilization is None else utilization
    return f"{stamp}, {gpu}, NVIDIA A10, P0, {utilization}, {memory}, [N/A]"


def log(*lines, header=HEADER):
    return "".join(line + "\n" for line in (header, *lines)).encode()


def test_records_of_one_time_are_one_row_although_each_gpu_is_stamped_by_itself(tmp_path):
    lines = [record(i, gpu, milliseconds=7 * gpu + i % 3) for i in range(20) for gpu in (0, 1)]
    read = Read(tmp_path, log(*lines))
    assert read.format == "nvidia-smi"
    metrics = ("memory.used [MiB]", "utilization.gpu [%]")
    assert read.names == [f'{name}{{index="{gpu}"}}' for name in metrics for gpu in (0, 1)]
    assert read.rows.tolist() == [[500, 500, i, 50 + i] for i in range(20)]
    assert set(read.ignored.values()) == {"not_numeric", "empty"}
    assert read.dropped == {}


def test_gpus_are_told_apart_by_index_before_uuid_and_by_uuid_without(tmp_path):
    lines = [record(i, gpu) for i in range(9) for gpu in (0, 1)]
    by_uuid = Read(tmp_path, log(*lines, header=HEADER.replace("index", "uuid")))
    assert by_uuid.names[0] == 'memory.used [MiB]{uuid="0"}'
    both = [f"{line}, GPU-{i % 2}" for i, line in enumerate(lines)]
    assert Read(tmp_path, log(*both, header=HEADER + ", uuid")).names == [
        name.replace("uuid", "index") for name in by_uuid.names
    ]


def test_a_gap_of_one_gpu_is_a_missing_cell_and_a_cut_last_line_is_left_out(tmp_path):
    lines = [record(i, gpu) for i in range(20) for gpu in (0, 1)]
    lines[11] = record(5, 1, utilization="[Unknown Error]")
    read = Read(tmp_path, log(*lines, HEADER, record(20, 0), record(20, 1))[:-9])
    assert (len(read.rows), read.dropped) == (21, {})
    lacking = [read.names[metric] for metric in np.flatnonzero(np.isnan(read.rows[5]))]
    assert lacking == ['utilization.gpu [%]{index="1"}']
    assert np.isnan(read.rows[20]).tolist() == [name.endswith('{index="1"}') for name in read.names]
    assert not np.isnan(np.delete(read.rows, [5, 20], axis=0)).any()


@pytest.mark.parametrize(
    ("bad", "line", "words"),
    [
        (record(5, 1, memory="5 GiB"), 6, "another unit"),
        (record(5, 1, memory="many"), 6, "text in another"),
        (record(5, 1) + ", 7", 6, "8 fields"),
        (record(5, 1).replace("2026/03/01", "01.03.2026"), 6, "no time stamp"),
        (record(5, "", utilization="1 %"), 6, "no name"),
        (record(0, 1, utilization="7 %"), 6, "two values at one time"),
    ],
)
def test_what_would_be_a_wrong_cell_is_refused_with_its_line(tmp_path, bad, line, words):
    error = refusal(tmp_path, log(*(record(i, gpu) for i in range(2) for gpu in (0, 1)), bad))
    assert (error.code, error.line) == ("malformed", line)
    assert words in error.message
    assert error.remedy
