"""Counters as rates per second: which metrics, resets and gaps, times of every format, and the same when scoring."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest
from scoring_data import clean_rows

from retraind import load_model, typed_json
from retraind.cli import main
from retraind.column_rules import HeldTo
from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.report import Manifest
from retraind.worker.ingest import describe, ingest
from retraind.worker.rates import Rates, counters_of
from retraind.worker.readers import delimited
from retraind.worker.scaler import scale, soften

START = 1_780_000_000


def write_table(path, names, rows):
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        table.writerows(rows)
    return path


def cached(path, work_dir, **data):
    """The rows of the cache in raw units; the softening has no part in what is near its mean."""
    work_dir.mkdir(exist_ok=True)
    ingested = ingest([path], work_dir, DataConfig(**data), lambda _: None)
    rows = np.fromfile(ingested.rows.path, "<f4").reshape(ingested.rows.num_rows, -1)
    return ingested, rows


@pytest.mark.parametrize(
    ("names", "counters", "schema", "asked", "perhaps"),
    [
        (["a_total", "b"], "raw", {}, [], []),
        (["a_total", "b"], "rate", {}, ["a_total"], []),
        (["a_total", "b"], "auto", {}, [], ["a_total"]),
        (['a_total{x="1"}', "total", "a_total_x"], "rate", {}, ['a_total{x="1"}'], []),
        (["a_total", "b"], "raw", {"b": "counter"}, ["b"], []),
        (["a_total", "b"], "auto", {"b": "counter"}, ["b"], ["a_total"]),
        (["a_total", "b_total"], "rate", {"a_total": "metric"}, ["b_total"], []),
        (["t_sum", "t_count", "n_count", "n_sum_x"], "rate", {}, ["t_sum", "t_count"], []),
        (['t_bucket{le="1"}', "sand_bucket"], "rate", {}, ['t_bucket{le="1"}'], []),
    ],
)
def test_names_and_the_configuration_say_what_may_be_a_counter(names, counters, schema, asked, perhaps):
    assert counters_of(names, DataConfig(counters=counters, schema=schema)) == (asked, perhaps)


def test_a_reset_counts_from_zero_and_a_gap_is_spanned():
    rates = Rates(["c", "g"], ["c"])
    values = [1000, 1050, 1150, np.nan, 1250, 20, 20, 70]
    seconds = [0, 5, 15, 20, 25, 35, 45, 50]
    rows = np.array([[value, 7.0] for value in values])
    expected = [np.nan, 10, 10, np.nan, 10, 2, 0, 10]
    found = rates.of(rows, np.array(seconds, float))
    np.testing.assert_array_equal(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1], 7.0)
    np.testing.assert_array_equal(rows[:, 0], values)
    np.testing.assert_array_equal(rates.of(np.array([[90, 7.0]]), np.array([60.0])), [[2, 7]])


def test_time_that_does_not_go_on_gives_no_rate():
    rates = Rates(["c"], ["c"])
    found = rates.of(np.array([[1.0], [3], [5], [9], [11]]), np.array([10.0, 10, 8, np.nan, 10]))
    np.testing.assert_array_equal(found[:, 0], [np.nan, np.nan, np.nan, np.nan, 3.0])


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_blocks_make_no_difference(cut):
    rng = np.random.default_rng(3)
    rows = np.cumsum(rng.integers(0, 9, (100, 3)), axis=0).astype(float)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[60:, 1] -= 150
    seconds = np.cumsum(rng.integers(1, 4, 100)).astype(float)
    whole = Rates(["a", "b", "c"], ["a", "b", "c"]).of(rows, seconds)
    rates = Rates(["a", "b", "c"], ["a", "b", "c"])
    parts = [rates.of(rows[i : i + cut], seconds[i : i + cut]) for i in range(0, 100, cut)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_counter_near_1e12_that_is_reset_becomes_its_slope(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 2048)
    m05 = [10**12 + 100 * row if row < 150 else 100 * (row - 150) for row in range(300)]
    rows = [(START + 10 * row, m05[row], (row * 7) % 5) for row in range(300)]
    path = write_table(tmp_path / "a.csv", ["ts", "m05", "load"], rows)
    ingested, found = cached(path, tmp_path / "w", schema={"m05": "counter"}, max_line_bytes=1024)
    assert ingested.dataset.rate_metrics == ["m05"]
    assert ingested.dataset.num_rows == 300
    assert ingested.dataset.num_missing_cells == 1
    expected = np.array([[10.0, load] for _, _, load in rows])
    expected[0, 0], expected[150, 0] = np.nan, 0.0  # the counter itself says 0 after the reset
    np.testing.assert_allclose(found, soften(scale(expected, ingested.scaler)), atol=1e-5)
    assert abs(ingested.scaler.centre[0] - 10) < 0.1
    assert ingested.scaler.scale[0] < 1
    raw, _ = describe([path], DataConfig())
    assert raw.rate_metrics == []


def exposition():
    """200 scrapes: a counter with a reset, a gauge with a counter's name, a histogram, a gauge."""
    lines = []
    for i in range(200):
        stamp = (START + 15 * i) * 1000
        lines.append(f"up_total {i * 30 if i < 100 else (i - 99) * 30} {stamp}")
        lines.append(f"swap_total {abs(i % 20 - 10)} {stamp}")
        lines.append(f'lat_bucket{{le="1"}} {i} {stamp}')
        lines.append(f"lat_sum {i * 1.5} {stamp}")
        lines.append(f"lat_count {2 * i} {stamp}")
        lines.append(f"load {i % 3} {stamp}")
    return "\n".join(lines) + "\n"


def test_auto_takes_what_rises_of_what_is_named_so(tmp_path):
    (tmp_path / "a.prom").write_text(exposition())
    dataset, scaler = describe([tmp_path / "a.prom"], DataConfig(counters="auto"))
    assert dataset.rate_metrics == ['lat_bucket{le="1"}', "lat_count", "lat_sum", "up_total"]
    centre = dict(zip(dataset.metric_names, scaler.centre, strict=True))
    assert centre["up_total"] == pytest.approx(2.0)
    assert centre["lat_sum"] == pytest.approx(0.1)
    assert centre["load"] == pytest.approx(np.mean([i % 3 for i in range(200)]))
    dataset, _ = describe([tmp_path / "a.prom"], DataConfig(counters="rate"))
    assert "swap_total" in dataset.rate_metrics


def test_without_time_stamps_auto_leaves_counters_as_they_are_and_rate_refuses(tmp_path):
    path = write_table(tmp_path / "a.csv", ["a_total", "b"], [(i, i % 3) for i in range(50)])
    dataset, scaler = describe([path], DataConfig(counters="auto"))
    assert (dataset.rate_metrics, scaler.centre[0]) == ([], 24.5)
    for data in (DataConfig(counters="rate"), DataConfig(schema={"b": "counter"})):
        with pytest.raises(DataError) as raised:
            describe([path], data)
        assert raised.value.code == "missing_columns"
        assert "time" in raised.value.remedy
    path = write_table(tmp_path / "a.csv", ["time", "a_total"], [("12/31/2025", i) for i in range(50)])
    with pytest.raises(DataError):
        describe([path], DataConfig(counters="rate"))


def test_a_row_of_counters_alone_without_a_value_before_is_dropped(tmp_path):
    path = write_table(tmp_path / "a.csv", ["time", "a_total"], [(START + i, 5 * i) for i in range(50)])
    dataset, scaler = describe([path], DataConfig(counters="rate"))
    assert (dataset.num_rows, dataset.num_dropped["missing"], dataset.problems[0].line) == (49, 1, 2)
    assert scaler.centre == [5.0]


TIMES = {
    "seconds": lambda i: START + 2 * i,
    "milliseconds": lambda i: (START + 2 * i) * 1000,
    "text": lambda i: f"2026-05-28T{i // 1800:02}:{i // 30 % 60:02}:{2 * i % 60:02}Z",
}


def tar_of(lines):
    """Two files, of which the second goes on where the first ends."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, part in (("1.csv", lines[:100]), ("2.csv", lines[100:])):
            data = "\n".join(["time,c,g", *part]).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def in_format(kind, stamps, counter, gauge):
    if kind == "csv":
        return "\n".join(["time,c,g", *map("{},{},{}".format, stamps, counter, gauge)]).encode()
    if kind == "tar":
        return tar_of(list(map("{},{},{}".format, stamps, counter, gauge)))
    if kind == "jsonl":
        lines = [{"g": g, "time": t, "c": c} for t, c, g in zip(stamps, counter, gauge, strict=True)]
        return "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = io.BytesIO()
    if kind == "npz":
        np.savez(file, time=np.array(stamps), c=counter, g=gauge)
        return file.getvalue()
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    times = arrow.array(np.array([f"{s:.3f}" for s in stamps], float) * 1000 if kind == "parquet" else stamps)
    if kind == "parquet":
        times = times.cast(arrow.int64()).cast(arrow.timestamp("ms", "UTC"))
    parquet.write_table(arrow.table({"time": times, "c": counter, "g": gauge}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        *((kind, unit) for kind in ("csv", "tar", "jsonl") for unit in TIMES),
        ("npz", "seconds"), ("npz", "milliseconds"), ("parquet", "seconds"), ("parquet of numbers", "milliseconds"),
    ],
)  # fmt: skip
def test_times_of_each_format_make_the_same_rates(tmp_path, kind, unit):
    counter = np.cumsum(np.arange(200) % 7)
    stamps, gauge = [TIMES[unit](i) for i in range(200)], np.arange(200) % 5
    (tmp_path / "data").write_bytes(in_format(kind, stamps, counter.tolist(), gauge.tolist()))
    dataset, scaler = describe([tmp_path / "data"], DataConfig(schema={"c": "counter"}))
    centre = dict(zip(dataset.metric_names, scaler.centre, strict=True))
    assert sorted(centre) == ["c", "g"]
    assert (dataset.num_rows, dataset.num_missing_cells) == (200, 1)
    assert centre["c"] == pytest.approx(np.diff(counter).mean() / 2)
    assert {column.name: column.reason for column in dataset.ignored_columns} in (
        {"time": "time"},
        {"time": "not_numeric"},
    )


def test_the_published_models_rates_are_made_of_any_later_file(tmp_path):
    # This file alone would not show a counter.
    path = write_table(tmp_path / "a.csv", ["time", "a_total", "b"], [(START + i, 100 - i, i) for i in range(50)])
    held = HeldTo(version="000001-aaaaaaaaaaaa", metric_names=["a_total", "b"], rate_metrics=["a_total"])
    data = DataConfig(counters="auto")
    assert describe([path], data)[0].rate_metrics == []
    assert describe([path], data, held_to=held)[0].rate_metrics == ["a_total"]


def test_a_file_is_scored_by_the_rates_that_the_model_learned(tmp_path, capsys):
    rates = clean_rows(1500, seed=4)
    names = ["requests_total", "b", "c", "d"]
    seconds = START + 30 * np.arange(1500)

    def counted(rates):
        rows = rates[:, [2, 0, 1, 3]]
        return np.concatenate([np.cumsum(rows[:, :1] * 30, axis=0), rows[:, 1:]], axis=1)

    def table(name, rates):
        rows = [(int(s), *map(repr, row.tolist())) for s, row in zip(seconds, counted(rates), strict=False)]
        return write_table(tmp_path / name, ["time", *names], rows)

    config = tmp_path / "retraind.yaml"
    config.write_text(
        "models: {dir: m}\nspool: {dir: spool}\nstate: {dir: state}\ndata: {counters: auto}\ntraining: {epochs: 20}\n"
    )
    assert main(["train", str(table("train.csv", rates)), "--config", str(config)]) == 0
    home = tmp_path / "m" / "telemetry_autoencoder"
    manifest = typed_json.decode((home / "current" / "manifest.json").read_bytes(), Manifest)
    assert manifest.dataset.rate_metrics == ["requests_total"]
    later = clean_rows(300, seed=5)
    capsys.readouterr()
    assert main(["score", str(table("later.csv", later)), "--config", str(config)]) == 0
    scored = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    expected = later[:, [2, 0, 1, 3]].copy()
    expected[0, 0] = np.nan
    scores = load_model(home).score(expected)
    assert [float(row["score"]) for row in scored] == pytest.approx(scores, rel=1e-3)
    assert max(scores) < 10


def test_a_row_without_any_rate_has_a_reason_in_place_of_a_score(tmp_path, capsys):
    rng = np.random.default_rng(8)
    counters = np.cumsum(rng.integers(0, 100, (400, 3)), axis=0)
    rows = [(START + i, *row) for i, row in enumerate(counters.tolist())]
    path = write_table(tmp_path / "a.csv", ["time", "a_total", "b_total", "c_total"], rows)
    config = tmp_path / "retraind.yaml"
    config.write_text(
        "models: {dir: m}\nspool: {dir: spool}\nstate: {dir: state}\ndata: {counters: rate}\ntraining: {epochs: 1}\n"
        "gate: {worse_than_mean: publish}\n"
    )
    assert main(["train", str(path), "--config", str(config)]) == 0
    capsys.readouterr()
    assert main(["score", str(path), "--config", str(config)]) == 0
    scored = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["line"], row["score"], row["reason"]) for row in scored[:1]] == [("2", "", "missing")]
    assert all(row["score"] and not row["reason"] for row in scored[1:])
    assert len(scored) == 400
