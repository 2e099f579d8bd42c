"""Room on the disks: what is kept in done/, and a floor below which nothing is started."""

import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def small_models(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB where models.dir belongs."""
    path = tmp_path / "models"
    path.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True, check=False
        )
        is_mounted = done.returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("no tmpfs can be mounted here: that needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


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
