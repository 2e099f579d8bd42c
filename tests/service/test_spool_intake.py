"""What a producer does, and what becomes of it: every way in which a file arrives, against the real service."""

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from harness import Service, eventually


def test_a_file_moved_in_is_trained_once_published_and_archived(service: Service) -> None:
    service.drop("a.csv", "content")
    job = service.wait_for_state("a.csv", "published")
    eventually(lambda: service.names("done") == ["a.csv"])
    assert (service.spool / "done" / "a.csv").read_text() == "content"
    assert service.trained() == ["a.csv"]
    assert (service.models / "telemetry_autoencoder.pt").read_text() == "content"
    assert job["version"] == service.live()["version"]
    eventually(lambda: not list((service.spool / "active").iterdir()))
    assert service.metric("retraind_jobs_total", result="published") == 1


def test_a_slow_writer_is_waited_for_however_long_it_pauses(service: Service) -> None:
    path = service.incoming / "slow.csv"
    with path.open("wb") as file:
        file.write(b"first half ")
        file.flush()
        eventually(lambda: service.metric("retraind_scans_total") > 8, "scans while the file is open")
        assert service.trained() == []
        file.write(b"second half")
    service.wait_for_state("slow.csv", "published")
    assert (service.models / "telemetry_autoencoder.pt").read_bytes() == b"first half second half"
    assert service.trained() == ["slow.csv"]


def test_lines_appended_one_by_one_become_one_job(make_service) -> None:
    service = make_service(intake={"quiet_seconds": 1.0}).start()
    path = service.incoming / "lines.csv"
    for number in range(20):
        subprocess.run(["sh", "-c", f'echo {number} >> "{path}"'], check=True)
    service.wait_for_state("lines.csv", "published")
    assert service.trained() == ["lines.csv"]
    assert len((service.models / "telemetry_autoencoder.pt").read_text().split()) == 20


def test_a_temporary_name_is_left_alone_until_it_is_renamed(service: Service) -> None:
    leftovers = [".b.csv.Q1w2E3", "c.csv.part", "c.csv~", "c.csv.filepart", "#c.csv#", "d.csv.TMP"]
    for name in leftovers:
        (service.incoming / name).write_text("unfinished")
    os.utime(service.incoming / ".b.csv.Q1w2E3", (1, 1))
    temporary = service.incoming / ".a.csv.Xy12Zq"
    with temporary.open("w") as file:
        file.write("whole")
    temporary.rename(service.incoming / "a.csv")
    service.wait_for_state("a.csv", "published")
    assert service.trained() == ["a.csv"]
    assert sorted(path.name for path in service.incoming.iterdir()) == sorted(leftovers)
    assert eventually(lambda: service.metric("retraind_spool_stale_temporary_files")) == 1


def test_what_lay_there_before_the_start_is_trained_by_mtime_then_name(make_service) -> None:
    service = make_service()
    service.incoming.mkdir(parents=True)
    now = time.time()
    for name, age in (("b.csv", 100), ("a.csv", 100), ("c.csv", 160)):
        service.drop(name, mtime=now - age)
    service.start()
    service.drop("d.csv")
    service.wait_for_state("d.csv", "published")
    assert service.trained() == ["c.csv", "a.csv", "b.csv", "d.csv"]


def test_two_hundred_files_at_once_are_each_trained_once_in_order(service: Service) -> None:
    service.drop("hold.csv")
    eventually(lambda: service.trained() == ["hold.csv"])
    now = time.time()
    for number in range(200):
        service.drop(f"{number:03}.csv", mtime=now - 1000 + number // 2)
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready") == 200, "200 files waiting")
    (service.spool / "release").touch()
    eventually(lambda: len(service.names("done")) == 201, "200 files done", seconds=180)
    assert service.trained() == ["hold.csv", *(f"{number:03}.csv" for number in range(200))]
    assert service.metric("retraind_jobs_total", result="published") == 201


def test_the_same_name_with_other_content_is_another_dataset_and_overwrites_nothing(service: Service) -> None:
    service.drop("a.csv", "one")
    service.wait_for_state("a.csv", "published")
    eventually(lambda: service.names("done") == ["a.csv"])
    service.drop("a.csv", "two")
    eventually(lambda: len(service.names("done")) == 2)
    contents = {path.read_text() for path in (service.spool / "done").iterdir()}
    assert contents == {"one", "two"}
    assert all(name.endswith(".csv") for name in service.names("done"))


def test_content_that_was_published_before_is_a_duplicate_and_not_published_again(service: Service) -> None:
    service.drop("a.csv", "one")
    service.wait_for_state("a.csv", "published")
    service.drop("b.csv", "two")
    service.wait_for_state("b.csv", "published")
    service.drop("again.csv", "one")
    job = service.wait_for_state("again.csv", "duplicate")
    assert service.states()["a.csv"] == "published"
    assert str(service.live()["dataset"]["name"]) == "b.csv"
    assert "the same content" in job["reason"]["message"]
    eventually(lambda: service.names("done") == ["a.csv", "again.csv", "b.csv"])


def test_with_duplicates_set_to_train_the_same_content_is_trained_again(make_service) -> None:
    service = make_service(intake={"duplicates": "train"}).start()
    service.drop("a.csv", "one")
    service.wait_for_state("a.csv", "published")
    service.drop("again.csv", "one")
    service.wait_for_state("again.csv", "published")
    assert service.live()["sequence"] == 2


def test_what_is_not_a_regular_file_is_put_aside_once_and_never_opened(service: Service, tmp_path: Path) -> None:
    victim = tmp_path / "victim.csv"
    victim.write_text("not yours")
    os.mkfifo(service.incoming / "fifo.csv")
    (service.incoming / "link.csv").symlink_to(victim)
    (service.incoming / "loop.csv").symlink_to("loop.csv")
    (service.incoming / "directory.csv").mkdir()
    (service.incoming / "directory.csv" / "inside.csv").write_text("kept")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(service.incoming / "socket.csv"))
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    refused = ["directory.csv", "fifo.csv", "link.csv", "loop.csv", "socket.csv"]
    eventually(lambda: service.names("quarantine") == refused, "all put aside")
    for name in refused:
        assert service.reason(name)["code"] == "not_regular"
    assert victim.read_text() == "not yours"
    assert (service.spool / "quarantine" / "directory.csv" / "inside.csv").read_text() == "kept"
    assert service.metric("retraind_quarantined_total", code="not_regular") == 5
    assert service.log().count("fifo.csv quarantined") == 1


def test_a_name_that_is_not_text_is_carried_through_byte_for_byte(service: Service) -> None:
    name = b"k\xff\xfe \n-name.csv"
    path = os.path.join(os.fsencode(service.incoming), name)
    with open(path + b".tmp", "wb") as file:
        file.write(b"bytes")
    os.rename(path + b".tmp", path)
    eventually(lambda: os.listdir(os.fsencode(service.spool / "done")) == [name], "archived under its own bytes")
    assert service.states() == {r"k\xff\xfe \n-name.csv": "published"}


def test_a_name_of_the_greatest_length_can_be_quarantined_with_its_reason(service: Service) -> None:
    name = "refuse-" + "x" * 244 + ".csv"
    assert len(name) == 255
    service.drop("staged", "bad").rename(service.incoming / name)
    eventually(lambda: len(service.names("quarantine")) == 1)
    kept = service.names("quarantine")[0]
    assert service.reason(kept)["code"] == "malformed"


def test_a_file_from_the_future_and_one_from_1970_are_both_trained(service: Service) -> None:
    service.drop("future.csv", mtime=time.time() + 172_800)
    service.drop("past.csv", mtime=0)
    service.wait_for_state("future.csv", "published")
    service.wait_for_state("past.csv", "published")


def test_files_are_found_after_incoming_was_replaced(service: Service) -> None:
    shutil.rmtree(service.incoming)
    eventually(lambda: service.metric("retraind_fault", fault="spool") == 1, "the fault is told")
    service.incoming.mkdir()
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")
    eventually(lambda: service.metric("retraind_fault", fault="spool") == 0, "the fault is over")
    assert service.metric("retraind_watch_mode", mode="inotify") == 1
    assert service.metric("retraind_watch_healthy") == 1


def test_without_inotify_the_service_polls_and_says_so(make_service) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    taken = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        service = make_service()
        for _ in range(10):  # another process of this user may give one back in between
            while len(taken) < 20_000 and (fd := libc.inotify_init1(os.O_CLOEXEC)) >= 0:
                taken.append(fd)  # every instance that this user may have
            if len(taken) >= min(20_000, hard - 100):
                pytest.skip("this user's inotify instances can not be used up")
            service.start()
            if service.metric("retraind_watch_mode", mode="poll") == 1:
                break
            service.kill()
        assert service.metric("retraind_watch_mode", mode="poll") == 1
        assert service.metric("retraind_watch_healthy") == 0
        service.drop("a.csv")
        service.wait_for_state("a.csv", "published")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_file_that_is_written_to_after_it_was_read_is_queued_again(service: Service) -> None:
    service.drop("hold.csv", "first")
    eventually(lambda: service.trained() == ["hold.csv"])
    claimed = next((service.spool / "active").glob("*/hold.csv"))
    with claimed.open("a") as file:
        file.write(" and more")
    (service.spool / "release").touch()
    eventually(lambda: service.names("done") == ["hold.csv"] and service.trained().count("hold.csv") == 2)
    assert (service.models / "telemetry_autoencoder.pt").read_text() == "first and more"
