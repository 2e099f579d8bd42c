"""`retraind score` on real files: one line for each row, whatever the order of columns, and the README's numbers."""

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from scoring_data import METRICS, clean_rows, publish, write_csv

from retraind import load_model
from retraind.cli import main
from retraind.commands import score_output
from retraind.config import DataConfig
from retraind.worker import scoring
from retraind.worker.readers.source import Source


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A configuration whose live model was trained on 4,000 rows."""
    directory = tmp_path_factory.mktemp("service")
    publish(directory, clean_rows(4000, seed=1), epochs=20)
    return directory


@pytest.fixture
def score(root, capsys):
    """Runs the command: exit status, rows as dictionaries, standard error."""

    def run(*arguments, read=csv.DictReader):
        status = main(["score", *map(str, arguments), "--config", str(root / "retraind.yaml")])
        shown = capsys.readouterr()
        return status, list(read(io.StringIO(shown.out))), shown.err

    return run


def test_a_fault_in_a_file_is_found_and_its_metric_is_named(score, tmp_path):
    rows = clean_rows(200, seed=2)
    rows[120, 6] += 300.0
    status, scored, said = score(write_csv(tmp_path / "a.csv", rows))
    assert status == 0
    assert [row["time"] for row in scored] == [f"2026-01-01T{number:05d}" for number in range(200)]
    assert [int(row["line"]) for row in scored] == list(range(2, 202))
    assert scored[120]["is_anomaly"] == "true"
    assert scored[120]["z_metric_1"] == "temperature"
    scores = [float(row["score"]) for row in scored]
    assert scores.index(max(scores)) in range(120, 130)  # rows that still have the fault before them in view
    assert max(scores[:120]) < scores[120]
    assert "a.csv: 200 rows, " in said
    assert "ignored: host" in said


def test_the_scores_of_a_file_are_those_of_the_array(score, root, tmp_path):
    rows = clean_rows(500, seed=3)
    _, scored, _ = score(write_csv(tmp_path / "a.csv", rows))
    expected = load_model(root / "published" / "telemetry_autoencoder").score(rows)
    assert [float(row["score"]) for row in scored] == pytest.approx(expected, rel=1e-5)


def test_the_order_of_columns_does_not_matter_and_others_are_ignored(score, tmp_path):
    rows = clean_rows(50, seed=4)
    order = np.random.default_rng(0).permutation(len(METRICS))
    _, straight, _ = score(write_csv(tmp_path / "a.csv", rows))
    mixed = np.column_stack([rows[:, order], np.arange(50)])
    names = [*(METRICS[place] for place in order), "fan_speed"]
    _, scored, said = score(write_csv(tmp_path / "b.csv", mixed, names))
    assert [row["score"] for row in scored] == [row["score"] for row in straight]
    assert "ignored: host, fan_speed" in said


GAPS = ["", "NaN", "inf"]


@pytest.mark.parametrize("quote", [False, True], ids=["plain", "quoted"])
def test_a_row_that_can_not_be_used_keeps_its_place_and_gives_the_reason(score, tmp_path, quote):
    """Both ways of reading text: whole blocks, and record by record where there are quotes."""
    cells = [[f"{value:.6f}" for value in row] for row in clean_rows(300, seed=5)]
    for number, text in enumerate([*GAPS, "oops"]):
        cells[100 + number][3] = text
    cells[110] = [""] * len(METRICS)
    path = write_csv(tmp_path / "a.csv", [], METRICS)
    host = '"a"' if quote else "a"
    lines = [f"t{number},{host},{','.join(row)}" for number, row in enumerate(cells)]
    lines[200] = "t200,a,1,2"
    lines.insert(50, "")
    path.write_text(path.read_text() + "\n".join(lines) + "\n")
    status, scored, said = score(path)
    assert status == 0
    assert len(scored) == 300
    assert {(row["time"], row["reason"]) for row in scored if row["reason"]} == {
        ("t103", "not_a_number"), ("t110", "missing"), ("", "ragged"),
    }  # fmt: skip
    assert all((row["score"] == "") == bool(row["reason"]) for row in scored)
    assert all((row["error_metric_1"] == "") == bool(row["reason"]) for row in scored)
    assert [int(row["line"]) for row in scored] == [number for number in range(2, 303) if number != 52]
    assert "3 not usable" in said
    holed = [row for row in scored if row["time"] in {"t100", "t101", "t102"}]
    named = {row[key] for row in holed for key in row if "_metric_" in key}
    assert named < {*METRICS, ""} - {METRICS[3]}, "a metric without a value is not to blame"


def test_json_lines_are_read_and_written_row_by_row(score, tmp_path):
    rows = clean_rows(20, seed=6)
    lines = [json.dumps({"ts": f"t{n}", **dict(zip(METRICS, row, strict=True))}) for n, row in enumerate(rows.tolist())]
    lines[7] = "{broken"
    lines[9] = json.dumps({"ts": "t9", "load": None})
    lines[11] = json.dumps({"ts": "t11", METRICS[0]: rows[11, 0]})
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    _, scored, _ = score(tmp_path / "a.jsonl", "--format", "jsonl", read=lambda text: map(json.loads, text))
    assert [row["line"] for row in scored] == list(range(1, 21))
    assert [(row["time"], row["reason"]) for row in scored if row["reason"]] == [("", "malformed"), ("t9", "missing")]
    assert scored[7]["score"] is None
    assert [part["metric"] for part in scored[11]["by_error"] + scored[11]["by_z"]] == [METRICS[0]] * 2
    assert scored[7]["by_error"] == []
    assert [len(row["by_z"]) for row in scored[:3]] == [3, 3, 3]
    assert set(scored[0]["by_error"][0]) == {"metric", "share"}


def test_a_parquet_file_has_the_rows_of_the_csv_with_their_types(score, tmp_path, monkeypatch):
    """Groups of 100 rows, so that what is gathered from blocks is written in several, the last one not full."""
    arrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, which is optional")
    monkeypatch.setattr(score_output, "GROUP_ROWS", 100)
    cells = [[f"{value:.6f}" for value in row] for row in clean_rows(60, seed=12)]
    cells[7][3] = "oops"
    path, out = write_csv(tmp_path / "a.csv", cells), tmp_path / "scores.parquet"
    files = [path, path, path]
    _, expected, _ = score(*files)
    status, shown, _ = score(*files, "--out", out, "--format", "parquet")
    assert (status, shown) == (0, [])
    found = arrow.ParquetFile(out)
    assert [found.metadata.row_group(group).num_rows for group in range(found.num_row_groups)] == [120, 60]
    table = found.read().to_pylist()
    assert len(table) == len(expected) == 180
    assert list(table[0]) == list(expected[0])
    assert {type(table[0][name]) for name in ("line", "score", "is_anomaly", "time")} == {int, float, bool, str}
    for row, line in zip(table, expected, strict=True):
        told = {name: "" if value is None else value for name, value in row.items()}
        told["is_anomaly"] = str(told["is_anomaly"]).lower()
        assert {name: cell for name, cell in told.items() if not isinstance(cell, float)} == {
            name: int(cell) if name == "line" else cell
            for name, cell in line.items()
            if not isinstance(told[name], float)
        }
        numbers = {name: cell for name, cell in told.items() if isinstance(cell, float)}
        assert numbers == pytest.approx({name: float(line[name]) for name in numbers}, rel=1e-6)
    assert table[7]["reason"] == "not_a_number"
    assert table[7]["score"] is table[7]["is_anomaly"] is table[7]["z_metric_1"] is None


def test_parquet_goes_into_a_pipe_too(root, tmp_path):
    arrow = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow, which is optional")
    file = write_csv(tmp_path / "a.csv", clean_rows(40, seed=13))
    command = [sys.executable, "-m", "retraind", "score", file, "--config", root / "retraind.yaml"]
    done = subprocess.run([*command, "--format", "parquet"], capture_output=True, timeout=120, check=True)
    assert arrow.read_table(io.BytesIO(done.stdout)).num_rows == 40


def test_without_pyarrow_parquet_is_refused_with_what_to_do_and_nothing_is_left(score, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = write_csv(tmp_path / "a.csv", clean_rows(5, seed=14))
    status, _, said = score(file, "--format", "parquet", "--out", tmp_path / "scores.parquet")
    assert status == 69
    assert "no_reader: Parquet is written by pyarrow, and " in said
    assert "--format csv or jsonl" in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.csv"]


def test_parquet_is_not_written_to_a_terminal(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    file = write_csv(tmp_path / "a.csv", clean_rows(5, seed=15))
    assert main(["score", str(file), "--format", "parquet", "--config", str(root / "retraind.yaml")]) == 64
    assert "--out" in capsys.readouterr().err


def test_an_array_file_is_scored_by_a_model_of_array_files(tmp_path, capsys):
    config = tmp_path / "retraind.yaml"
    config.write_text("models: {dir: published}\nspool: {dir: spool}\nstate: {dir: state}\n")
    rows = clean_rows(2000, seed=7)
    rows[::7, 2] = np.nan  # what is missing has no part in what is learned
    np.save(tmp_path / "a.npy", rows)
    assert main(["train", str(tmp_path / "a.npy"), "--config", str(config), "--epochs", "20"]) == 0
    rows[3, 0] = np.nan
    np.save(tmp_path / "b.npy", rows[:10])
    capsys.readouterr()
    assert main(["score", str(tmp_path / "b.npy"), "--config", str(config)]) == 0
    scored = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["reason"] for row in scored] == [""] * 10
    assert all(0 < float(row["score"]) < 2 for row in scored)


def test_a_file_without_a_metric_of_the_model_ends_with_65_and_names_it(score, root, tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", clean_rows(5, seed=8)[:, 1:], METRICS[1:])
    out = tmp_path / "scores.csv"
    assert main(["score", str(path), "--out", str(out), "--config", str(root / "retraind.yaml")]) == 65
    assert "missing_columns: 1 metrics of the model are missing: load" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.csv"], "no half of a result"


def test_without_a_model_the_command_ends_with_69(tmp_path, capsys, root):
    path = write_csv(tmp_path / "a.csv", clean_rows(5, seed=9))
    assert main(["score", str(path), "--model", str(tmp_path), "--config", str(root / "retraind.yaml")]) == 69
    assert "no_model" in capsys.readouterr().err


def test_a_result_in_a_file_is_put_there_whole_and_replaces_an_older_one(score, tmp_path):
    path = write_csv(tmp_path / "a.csv", clean_rows(30, seed=10))
    out = tmp_path / "scores.csv"
    out.write_text("old")
    status, shown, _ = score(path, path, "--out", out)
    assert (status, shown) == (0, [])
    scored = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["file"] for row in scored] == ["a.csv"] * 60
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.csv", "scores.csv"]


def test_blocks_come_one_by_one_so_that_memory_is_bounded(root, tmp_path):
    """Twelve megabytes of text are four blocks of a reader."""
    rows = np.tile(clean_rows(1000, seed=11), (80, 1))
    detector = load_model(root / "published" / "telemetry_autoencoder")
    with Source(write_csv(tmp_path / "a.csv", rows), DataConfig()) as source:
        sizes = [len(block) for block in scoring.ScoredFile(source, detector, DataConfig())]
    assert sum(sizes) == 80_000
    assert max(sizes) < 40_000
