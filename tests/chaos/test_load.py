"""Very many files and very many jobs: what the service needs does not grow with either.

The long forms behind CHAOS_LONG train on each of 10,000 files and run 2,000 jobs; the short ones are in every run.
"""

import os
import re
from pathlib import Path

import pytest
from accounts import Accounts, lying, settle, versions
from harness import Service, eventually

IS_LONG = bool(os.environ.get("CHAOS_LONG"))
NUM_FILES = 10_000
NUM_TRAINED = NUM_FILES if IS_LONG else 20
NUM_JOBS = 2000 if IS_LONG else 300
MAX_RESIDENT_MIB = 60


def needs(pid: int) -> dict[str, float]:
    """What a process holds of the machine."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "MiB": int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024,
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


@pytest.mark.slow
def test_ten_thousand_files_at_once_wait_in_bounded_memory_and_none_is_lost(make_service) -> None:
    service, accounts = make_service(), Accounts()
    service.incoming.mkdir(parents=True)
    for number in range(NUM_FILES):
        data = b"content %d" % (number % 100)
        accounts.note(data)
        (service.incoming / f"{number:05}.csv").write_bytes(data)
    service.start()
    waiting = "retraind_spool_files"
    eventually(lambda: service.metric(waiting, state="incoming_ready") > NUM_FILES * 0.9, "all are seen")
    most = needs(service.process.pid)

    def num_done() -> int:
        for name, amount in needs(service.process.pid).items():
            most[name] = max(most[name], amount)
        return len(os.listdir(service.spool / "done"))

    eventually(lambda: num_done() >= NUM_TRAINED, f"{NUM_TRAINED} have come to their end", seconds=3600)
    print(f"\n{NUM_FILES} files, {num_done()} ended, at most {most}")
    assert most["MiB"] < MAX_RESIDENT_MIB
    assert most["threads"] < 10
    assert most["descriptors"] < 40
    if IS_LONG:
        settle(service, seconds=60)
        accounts.check(service)
        return
    assert service.stop() == 0
    assert lying(service) == accounts.dropped
    assert len(versions(service)) == len({version["dataset"]["sha256"] for version in versions(service)})


def temporary_files(service: Service) -> int:
    """What lies in state and models beside records and versions."""
    hidden = [path for root in (service.state, service.models) for path in root.rglob(".*")]
    return len(hidden) + len(list(service.state.glob("jobs/*/work")))


@pytest.mark.slow
def test_many_jobs_leave_the_service_below_sixty_megabytes_and_without_leaks(make_service) -> None:
    service, accounts = make_service().start(), Accounts()
    pid = service.process.pid
    for number in range(NUM_JOBS):
        accounts.note(b"%d.csv" % number)
        service.drop(f"{number}.csv")
    done = service.spool / "done"
    eventually(lambda: len(os.listdir(done)) >= NUM_JOBS // 10, "the first tenth", seconds=600)
    first = needs(pid)
    settle(service, seconds=3600)
    eventually(lambda: service.metric("retraind_job_active") == 0)
    last = needs(pid)
    print(f"\n{NUM_JOBS} jobs: after a tenth {first}, after all {last}")
    accounts.check(service)
    assert service.metric("retraind_jobs_total", result="published") == NUM_JOBS
    assert last["MiB"] < MAX_RESIDENT_MIB
    assert last["MiB"] < first["MiB"] + 4
    assert last["descriptors"] <= first["descriptors"] + 2
    # That of the last scrape may not have ended yet.
    eventually(lambda: needs(pid)["threads"] <= first["threads"], "no more threads than after the first tenth")
    assert temporary_files(service) <= 3, "the locks only"
