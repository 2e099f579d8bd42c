"""The benchmark runs, and both variants of it learn the same. No test looks at the speed of a machine."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_speed.py"


def bench(*options):
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.slow
def test_both_variants_reach_the_same_loss_and_the_report_is_complete():
    result = json.loads(bench("--rows", "50000", "--epochs", "2", "--rounds", "1", "--json"))
    assert result["ours"]["loss"] == pytest.approx(result["naive"]["loss"], abs=1e-3)
    for variant in ("naive", "ours"):
        row = result[variant]
        assert set(row) >= {"rows_per_second", "loss", "peak_mib"}
        assert row["rows_per_second"] > 0
        assert 50 < row["peak_mib"] < 4000
    assert result["ratio"] == pytest.approx(result["ours"]["rows_per_second"] / result["naive"]["rows_per_second"])
    assert result["setting"]["rows"] == 50000
    assert result["machine"]["num_cpus"] >= 1


@pytest.mark.slow
def test_the_memory_of_a_whole_job_is_measured_on_a_csv_file():
    result = json.loads(bench("--csv", "--rows", "3000", "--epochs", "1", "--json"))
    assert result["rows"] == 3000
    assert 100 < result["peak_mib"] < 4000
    assert result["csv_mib"] > 0.5


def test_scoring_is_measured_beside_the_plain_forward_pass():
    command = [sys.executable, str(SCRIPT.with_name("score_speed.py")), "--rows", "20000", "--rounds", "1", "--json"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert set(result["rows_per_second"]) == {"score", "plain"}
    assert result["ratio"] == pytest.approx(result["rows_per_second"]["score"] / result["rows_per_second"]["plain"])


def test_reading_is_measured_beside_the_fields_own_readers():
    options = ["--rows", "3000", "--rounds", "1", "--json"]
    formats = ["csv", "jsonl"]
    if find_spec("pyarrow"):
        formats.append("parquet")
    options += [word for kind in formats for word in ("--format", kind)]
    command = [sys.executable, str(SCRIPT.with_name("read_speed.py")), *options]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert list(result["formats"]) == formats
    for found in result["formats"].values():
        assert found["rows"] == {"whole": 3000, "reader": 3000, "theirs": 3000}
        speeds = found["megabytes_per_second"]
        assert found["ratio"]["whole"] == pytest.approx(speeds["whole"] / speeds["theirs"])
        assert 20 < found["peak_mib"]["whole"] < 2000


@pytest.mark.slow
def test_the_way_from_a_drop_to_a_publication_is_measured_with_a_ready_worker_and_a_cold_one():
    command = [sys.executable, str(SCRIPT.with_name("drop_to_publish.py")), "--rows", "2000", "--epochs", "1", "--json"]
    command += ["--small-rounds", "1", "--large-rounds", "1"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    for size in ("small", "large"):
        for name in ("ready", "cold"):
            row = result[size][name]
            assert row["rounds"] == 1
            assert row["seconds_min"] == row["seconds"] == row["seconds_max"] > 0
            assert row["seconds"] == pytest.approx(sum(row["stages"].values()))
            assert row["cpu_seconds"] > 0
            assert 100 < row["peak_mib"] < 4000
    assert result["setting"]["large_rows"] == 2000


def test_the_help_names_every_option():
    text = bench("--help")
    assert all(option in text for option in ("--rows", "--epochs", "--rounds", "--json", "--csv"))
