"""The real service with the real worker: real files in, weights that a consumer loads out."""

import gzip
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Service, eventually

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "tests" / "demo"))

from guide import TelemetryAutoencoder

HEADER = ",".join(f"m{metric:02}" for metric in range(32))


def row(number: int) -> list[str]:
    return [f"{math.sin(number * 0.1 + metric) * 10 + metric:.4f}" for metric in range(32)]


def good(num_rows: int, first: int = 0) -> str:
    """A header and num_rows rows of 32 metrics."""
    return "\n".join([HEADER, *(",".join(row(number)) for number in range(first, first + num_rows))]) + "\n"


@pytest.fixture
def real(make_service) -> Service:
    return make_service(fake=False).start()


def test_a_parquet_file_waits_for_pyarrow_while_others_are_trained_and_is_then_read(make_service, tmp_path) -> None:
    library = pytest.importorskip("pyarrow", reason="needs pyarrow, which is optional")
    parquet = pytest.importorskip("pyarrow.parquet")
    venv.create(tmp_path / "venv", symlinks=True)
    site = tmp_path / f"venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for entry in Path(library.__file__).parents[1].iterdir():
        if not entry.name.startswith(("retraind", "__editable__", "_virtualenv", "pyarrow")):
            (site / entry.name).symlink_to(entry)
    service = make_service(fake=False, data={"metrics": "own"})
    service.settings["worker"]["python"] = str(tmp_path / "venv/bin/python")
    service.write_config()
    service.start()
    file = io.BytesIO()
    parquet.write_table(library.table({f"m{metric}": np.sin(np.arange(900.0) * metric) for metric in range(3)}), file)
    service.drop("lake.parquet", file.getvalue())
    reason = service.wait_for_state("lake.parquet", "deferred")["reason"]
    assert reason["code"] == "no_reader"
    assert "python3-pyarrow" in reason["remedy"]
    (tmp_path / "lake.parquet").write_bytes(file.getvalue())
    command = [
        sys.executable,
        "-m",
        "retraind",
        "train",
        str(tmp_path / "lake.parquet"),
        "--models",
        str(tmp_path / "m"),
    ]
    by_hand = subprocess.run([*command, "--config", service.config_path], capture_output=True, text=True, check=False)
    assert (by_hand.returncode, "no_reader" in by_hand.stderr) == (69, True)  # and it does not wait
    service.drop("node.csv", good(3000))
    service.wait_for_state("node.csv", "published")
    (site / "pyarrow").symlink_to(Path(library.__file__).parent)
    service.signal(signal.SIGHUP)
    assert service.wait_for_state("lake.parquet", "published")["attempts"] == 1
    assert service.live()["dataset"]["format"] == "parquet"


def load_live(service: Service) -> tuple[dict[str, object], torch.nn.Module]:
    """As a consumer does: resolve the live version once, check it, load it strictly into a class of its own."""
    version = (service.models / "telemetry_autoencoder" / "current").resolve()
    manifest = json.loads((version / "manifest.json").read_text())
    model = TelemetryAutoencoder(manifest["shape"]["input_dim"], manifest["shape"]["latent_dim"])
    model.load_state_dict(torch.load(version / "weights.pt", weights_only=True), strict=True)
    return manifest, model.eval()


def test_a_csv_becomes_weights_that_the_guides_class_loads(real: Service) -> None:
    real.drop("node.csv", good(3000))
    real.wait_for_state("node.csv", "published")
    manifest, model = load_live(real)
    assert (real.models / "telemetry_autoencoder.pt").resolve().name == "weights.pt"
    assert manifest["metric_names"] == HEADER.split(",")
    assert manifest["dataset"]["num_rows"] == 3000
    assert manifest["training"]["epochs"] >= 5
    assert manifest["training"]["batch_size"] == 64  # of 2,700 rows, for 40 steps an epoch
    assert manifest["evaluation"]["num_heldout_rows"] == 300
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert {check["name"] for check in manifest["checks"]} >= {"host.memory", "host.disk"}
    assert [criterion["passed"] for criterion in manifest["gate"]] == [True] * len(manifest["gate"]) != []
    page = (real.models / "telemetry_autoencoder" / "current" / "report.html").read_text()
    assert "from node.csv: 3,000 rows of" in page
    with torch.no_grad():
        assert model(torch.zeros(4, 5 * 32)).shape == (4, 5 * 32)
    assert real.metric("retraind_rows_used_total") == 3000


def test_the_same_file_and_seed_give_the_same_weights_bit_for_bit(make_service, tmp_path: Path) -> None:
    service = make_service(fake=False, intake={"duplicates": "train"}).start()
    for name in ("one.csv", "two.csv"):
        service.drop(name, good(2500))
        service.wait_for_state(name, "published")
    versions = sorted((service.models / "telemetry_autoencoder" / "versions").iterdir())
    first, second = (path / "weights.pt" for path in versions)
    assert first.read_bytes() == second.read_bytes()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


class _Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["RETRAIND_TEST_MARK"],)


REFUSED = {
    "empty": b"",
    "no_rows": (HEADER + "\n").encode(),
    "too_few_rows": good(1).encode(),
    "no_numeric": b"host,state\n" + b"a,up\nb,down\n" * 50,
    "ambiguous_columns": b"a,b,a\n" + b"1,2,3\n" * 50,
    "encoding": good(50).encode("utf-16"),
    "truncated": gzip.compress(good(300).encode())[:-200],
    "malformed": gzip.compress(good(300).encode())[:100] + b"x" * 500,
    "too_many_bad_rows": (good(50) + "1,2,3\n" * 50).encode(),
    "too_many_columns": (",".join(f"c{number}" for number in range(5000)) + "\n" + "1," * 4999 + "1\n").encode(),
    "unsupported_format": b"\x89HDF" + bytes(500),
    "shape": _npy(np.zeros((4, 5, 6))),
}


def test_every_kind_of_bad_file_is_quarantined_with_its_code_and_the_model_stays(make_service, monkeypatch) -> None:
    real = make_service(fake=False, data={"metrics": "own"}).start()
    mark = real.root / "executed"
    monkeypatch.setenv("RETRAIND_TEST_MARK", str(mark))
    real.drop("good.csv", good(300))
    real.wait_for_state("good.csv", "published")
    live = real.live()
    refused = REFUSED | {"object_dtype": _npy(np.array([[_Payload()] * 3] * 10, dtype=object))}
    for code, data in refused.items():
        (real.root / "staged").write_bytes(data)
        (real.root / "staged").rename(real.incoming / f"{code}.dat")
    for code in refused:
        real.wait_for_state(f"{code}.dat", "quarantined")
    eventually(lambda: len(real.names("quarantine")) == len(refused))
    assert {name.removesuffix(".dat"): real.reason(name)["code"] for name in real.names("quarantine")} == {
        code: code for code in refused
    }
    for code, data in refused.items():
        assert (real.spool / "quarantine" / f"{code}.dat").read_bytes() == data
        assert real.reason(f"{code}.dat")["attempts"] == 1
        assert real.reason(f"{code}.dat")["sha256"] == hashlib.sha256(data).hexdigest()
        assert real.metric("retraind_quarantined_total", code=code) == 1
        assert real.log().count(f"{code}.dat quarantined: {code}") == 1
    assert not mark.exists(), "nothing executes from dropped data"
    assert real.live() == live
    real.drop("next.csv", good(301))
    real.wait_for_state("next.csv", "published")


def test_a_bad_cell_is_named_with_its_line_and_column(make_service) -> None:
    service = make_service(fake=False, data={"max_bad_share": 0.0}).start()
    lines = good(100).splitlines()
    lines[41] = lines[41].replace(lines[41].split(",")[3], "broken", 1)
    service.drop("cell.csv", "\n".join(lines))
    service.wait_for_state("cell.csv", "quarantined")
    reason = service.reason("cell.csv")
    assert (reason["code"], reason["line"], reason["column"]) == ("too_many_bad_rows", 42, 4)
    result = service.command("inspect", "--json", str(service.spool / "quarantine" / "cell.csv"))
    assert result.returncode == 65
    assert json.loads(result.stdout)["line"] == 42


def test_a_candidate_above_the_gates_limit_is_rejected(make_service) -> None:
    service = make_service(fake=False, gate={"max_heldout_loss": 1e-9}).start()
    service.drop("a.csv", good(300))
    job = service.wait_for_state("a.csv", "rejected")
    assert job["reason"]["code"] == "loss_above_limit"
    eventually(lambda: service.names("quarantine") == ["a.csv"])
    assert service.live() is None


def test_sigterm_in_the_middle_of_training_loses_nothing(make_service) -> None:
    service = make_service(fake=False, training={"epochs": 100_000}).start()
    service.drop("long.csv", good(3000))
    eventually(lambda: service.metric("retraind_job_epoch"), "training")
    assert service.stop() == 0
    assert service.states() == {"long.csv": "queued"}
    service.settings["training"] = {"epochs": 3}
    service.write_config()
    service.start()
    service.wait_for_state("long.csv", "published")
    assert service.live()["sequence"] == 1
    assert service.live()["training"]["epochs"] == 3


@pytest.mark.parametrize("victim", ["service", "worker"])
def test_kill_9_in_the_middle_of_training_loses_nothing(make_service, victim: str) -> None:
    service = make_service(fake=False, training={"epochs": 100_000}).start()
    service.drop("long.csv", good(3000))
    eventually(lambda: service.metric("retraind_job_epoch"), "training")
    children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children")
    worker = int(children.read_text().split()[0])
    service.settings["training"] = {"epochs": 3}
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in service.log())
    if victim == "worker":
        os.kill(worker, signal.SIGKILL)
    else:
        service.kill()
        eventually(lambda: not Path(f"/proc/{worker}").exists(), "the worker goes with the service")
        service.start()
    job = service.wait_for_state("long.csv", "published")
    assert job["attempts"] == (2 if victim == "worker" else 1)
    assert service.live()["sequence"] == 1
    eventually(lambda: service.names("done") == ["long.csv"])


def test_a_worker_under_another_interpreter_needs_no_retraind_there(make_service) -> None:
    service = make_service(fake=False)
    # The same interpreter, started so that the environment's own packages are there and retraind is not.
    launcher = service.root / "other-python"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "$@"\n')
    launcher.chmod(0o755)
    service.settings["worker"]["python"] = "other-python"
    service.write_config()
    service.start()
    service.drop("a.csv", good(300))
    service.wait_for_state("a.csv", "published")


REAL_FILES = {
    "smd/machine-1-6_train.csv.gz": 38,
    "asd/omi-1_train.csv.gz": 19,
    "skab/anomaly-free/anomaly-free.csv": 8,
    "nab/realAWSCloudwatch/ec2_cpu_utilization_24ae8d.csv": 1,
}


@pytest.mark.parametrize(("name", "num_metrics"), REAL_FILES.items())
def test_real_telemetry_trains_through_the_spool(real: Service, name: str, num_metrics: int) -> None:
    source = SHARED / name
    if not source.exists():
        pytest.skip(f"{source} is not there: real telemetry is kept beside the project")
    real.drop(source.name, source.read_bytes())
    real.wait_for_state(source.name, "published")
    manifest, model = load_live(real)
    assert len(manifest["metric_names"]) == num_metrics == model.encoder[0].in_features / 5
    opened = gzip.open(source, "rt") if source.suffix == ".gz" else source.open()
    with opened as file:
        num_lines = sum(1 for line in file if line.strip()) - (source.suffix != ".gz")
    assert manifest["dataset"]["num_rows"] + sum(manifest["dataset"]["num_dropped"].values()) == num_lines
    assert manifest["evaluation"]["heldout_loss"] > 0
    assert math.isfinite(manifest["evaluation"]["heldout_loss"])


def test_train_in_the_foreground_publishes_the_same_weights_as_the_service(real: Service) -> None:
    path = real.root / "kept.csv"
    path.write_text(good(2500))
    result = real.command("train", str(path), "--models", str(real.root / "elsewhere"), "--json")
    assert result.returncode == 0, result.stderr
    published = json.loads(result.stdout)
    real.drop("dropped.csv", good(2500))
    real.wait_for_state("dropped.csv", "published")
    assert real.live()["weights_sha256"] == published["weights_sha256"]


def test_train_tells_what_is_wrong_with_a_file_and_ends_with_65(real: Service) -> None:
    path = real.root / "bad.csv"
    path.write_text("host,state\na,up\nb,down\n")
    result = real.command("train", str(path), "--models", str(real.root / "elsewhere"))
    assert result.returncode == 65
    assert result.stderr.splitlines()[-1].startswith("retraind train: no_numeric")
    assert not (real.root / "elsewhere" / "telemetry_autoencoder.pt").exists()


def test_inspect_shows_what_would_be_used(real: Service) -> None:
    path = real.root / "table.csv"
    lines = good(100).splitlines()
    lines[5] = lines[5].replace(lines[5].split(",")[0], "", 1)
    path.write_text("\n".join(f"{number},{line}" if number else f"note,{line}" for number, line in enumerate(lines)))
    text = path.read_text().replace("\n", "\n#")
    path.write_text(text)
    found = json.loads(real.command("inspect", str(path), "--json").stdout)
    assert (found["num_rows"], sum(found["num_dropped"].values())) == (100, 0)
    assert found["num_missing_cells"] == 1
    assert found["most_missing"] == [{"name": HEADER.split(",")[0], "num_cells": 1}]
    assert found["metric_names"] == HEADER.split(",")
    assert found["ignored_columns"] == [{"name": "note", "reason": "not_numeric"}]
    assert len(found["sha256"]) == 64
    people = real.command("inspect", str(path))
    assert people.returncode == 0
    assert "m31" in people.stdout


def without(name: str, text: str) -> str:
    """The table without one column."""
    rows = [line.split(",") for line in text.splitlines()]
    place = rows[0].index(name)
    return "".join(",".join(cells[:place] + cells[place + 1 :]) + "\n" for cells in rows)


def test_a_changed_set_of_columns_is_held_to_the_published_model_until_the_operator_says_otherwise(real) -> None:
    real.drop("1.csv", good(300))
    real.wait_for_state("1.csv", "published")
    real.drop("2.csv", without("m17", good(300, first=300)))
    reason = real.reason("2.csv")
    assert reason["code"] == "missing_columns"
    assert "are missing: m17" in reason["message"]
    assert "000001-" in reason["message"]
    beside = ["m32,note", *(f"{number},x" for number in range(300))]
    lines = zip(good(300, first=600).splitlines(), beside, strict=True)
    real.drop("3.csv", "".join(f"{line},{more}\n" for line, more in lines))
    real.wait_for_state("3.csv", "published")
    manifest = real.live()
    assert manifest["metric_names"] == HEADER.split(",")
    ignored = {column["name"]: column["reason"] for column in manifest["dataset"]["ignored_columns"]}
    assert ignored == {"m32": "extra", "note": "not_numeric"}
    assert manifest["dataset"]["held_to"].startswith("000001-")
    shown = real.command("inspect", str(real.spool / "done" / "3.csv"))
    assert re.search(r"metrics +32, as version 000002-", shown.stdout)
    assert "m32 (extra)" in shown.stdout
    assert real.command("inspect", str(real.spool / "quarantine" / "2.csv")).returncode == 65
    real.settings["data"] = {"metrics": "own"}
    real.write_config()
    real.notified.clear()
    real.signal(signal.SIGHUP)
    eventually(lambda: "READY=1" in real.notifications())
    real.drop("4.csv", without("m17", good(300, first=600)))
    real.wait_for_state("4.csv", "published")
    assert real.live()["metric_names"] == [name for name in HEADER.split(",") if name != "m17"]
