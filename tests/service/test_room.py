"""Room on the disks: what is kept in done/, and a floor below which nothing is started."""

import io
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from harness import Service, eventually

MIB = 2**20
A_MOMENT_IN_DAYS = 1e-6  # less than a tenth of a second


def test_done_keeps_everything_by_default_and_what_the_limits_say_after_a_reload(service: Service) -> None:
    for name in ("a.csv", "refuse.csv"):
        service.drop(name, mtime=1)
    service.wait_for_state("a.csv", "published")
    service.reason("refuse.csv")
    eventually(lambda: service.names("done") == ["a.csv"])
    service.settings["spool"]["done_max_age_days"] = A_MOMENT_IN_DAYS
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: service.names("done") == [])
    eventually(lambda: service.metric("retraind_done_removed_files_total") == 1)
    assert service.metric("retraind_done_removed_bytes_total") == len("a.csv")
    assert service.log().count("removed 1 files of 5 bytes") == 1
    assert service.names("quarantine") == ["refuse.csv"]
    assert service.states() == {"a.csv": "published", "refuse.csv": "quarantined"}
    service.drop("a.csv")  # the memory of duplicates is in the records, not in done/
    service.wait_for_state("a.csv", "duplicate")


def test_the_newest_bytes_are_kept_however_old_the_producer_says_they_are(make_service) -> None:
    service = make_service(spool={"done_max_bytes": 1_000}).start()
    for name, mtime in (("first.csv", 3e9), ("second.csv", 2e9), ("third.csv", 1)):
        service.drop(name, name * 100, mtime=mtime)
        service.wait_for_state(name, "published")
        eventually(lambda name=name: name in service.names("done"), f"{name} is archived")
    eventually(lambda: service.names("done") == ["third.csv"], "the limit holds")
    service.drop("last.csv", "last" * 10)
    service.wait_for_state("last.csv", "published")
    eventually(lambda: service.metric("retraind_spool_files", state="done") == 2)
    assert service.names("done") == ["last.csv", "third.csv"]


@contextmanager
def filesystem_of(num_mib: int, path: Path) -> Iterator[Path]:
    """A small filesystem at `path`."""
    path.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "none", str(path)]
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("no tmpfs can be mounted here: that needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_models(tmp_path: Path) -> Iterator[Path]:
    """Where models.dir belongs."""
    with filesystem_of(8, tmp_path / "models") as path:
        yield path


@pytest.fixture
def small_state(tmp_path: Path) -> Iterator[Path]:
    """Where state.dir belongs."""
    with filesystem_of(80, tmp_path / "state") as path:
        yield path


def is_ready(service: Service) -> bool:
    try:
        return service.get("/-/ready") == "ready\n"
    except urllib.error.HTTPError as error:
        assert error.code == 503
        assert "low_disk: less than 4 MiB" in error.read().decode()
        return False


def test_below_the_floor_nothing_is_started_what_runs_is_published_and_it_heals_by_itself(
    small_models: Path, make_service
) -> None:
    service = make_service(limits={"min_free_bytes": 4 * MIB}).start()
    service.drop("hold.csv")
    eventually(lambda: service.trained() == ["hold.csv"])
    filler = small_models / "filler"
    filler.write_bytes(bytes(6 * MIB))
    eventually(lambda: service.metric("retraind_fault", fault="low_disk") == 1)
    assert not is_ready(service)
    assert service.metric("retraind_ready") == 0
    assert service.states() == {"hold.csv": "running"}
    assert service.metric("retraind_disk_free_bytes", directory="models") < 4 * MIB
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    service.drop("next.csv")
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready") == 1)
    eventually(lambda: service.status()["state"] == "degraded")
    assert str(small_models) in service.status()["faults"]["low_disk"]
    assert (service.incoming / "next.csv").exists()
    assert service.trained() == ["hold.csv"]
    filler.unlink()
    service.wait_for_state("next.csv", "published")
    eventually(lambda: is_ready(service))
    assert service.log().count("low_disk: less than") == 1
    assert service.log().count("low_disk: works again") == 1


def test_a_floor_that_is_lowered_counts_at_the_reload(service: Service) -> None:
    service.settings["limits"] = {"min_free_bytes": 2**62}
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: service.metric("retraind_fault", fault="low_disk") == 1)
    service.drop("a.csv")
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready") == 1)
    service.settings["limits"] = {"min_free_bytes": 0}
    service.write_config()
    service.signal(signal.SIGHUP)
    service.wait_for_state("a.csv", "published")
    assert service.metric("retraind_fault", fault="low_disk") == 0


def array_of(num_mib: int, *, is_fortran: bool) -> bytes:
    """A .npy file of one byte a value, which takes four in the cache of rows."""
    head = io.BytesIO()
    facts = {"descr": "|i1", "fortran_order": is_fortran, "shape": (num_mib * MIB // 8, 8)}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue() + np.random.default_rng(5).bytes(num_mib * MIB)


@pytest.mark.usefixtures("small_state")
def test_a_dataset_for_which_there_is_too_little_room_waits_alone(make_service) -> None:
    service = make_service(fake=False, limits={"min_free_bytes": MIB}, data={"metrics": "own"}).start()
    service.drop("large.npy", array_of(24, is_fortran=False), mtime=1)
    service.drop("never.npy", array_of(81, is_fortran=True), mtime=2)
    service.drop("small.csv", "a,b\n" + "".join(f"{row},{row % 7}\n" for row in range(300)), mtime=3)
    service.wait_for_state("small.csv", "published")
    states = service.states()
    assert (states.pop("small.csv"), states.pop("never.npy")) == ("published", "quarantined")
    assert states["large.npy"] in {"deferred", "running"}
    reason = service.reason("never.npy")
    assert reason["code"] == "too_large"
    assert "state.dir" in str(reason["remedy"])
    eventually(lambda: service.states()["large.npy"] == "deferred")
    [job] = [job for job in service.jobs() if job["name"] == "large.npy"]
    assert job["attempts"] == 0
    assert job["reason"]["code"] == "disk_full"
    assert service.metric("retraind_fault", fault="disk") == 0
    assert (service.spool / "active" / str(job["id"]) / "large.npy").exists()
