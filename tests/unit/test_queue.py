"""The pauses between attempts, kept for as long as their job is open, and what is refused at the door."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
from builders import JOB_ID, NOW, OTHER_ID, make_job

from retraind import fsio
from retraind.config import Config, IntakeConfig
from retraind.job import JobState, advance
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.queue import Queue
from retraind.supervisor.spool import Spool
from retraind.supervisor.wake import Wake


def test_the_pause_of_a_job_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    spool, ledger, wake = Spool(tmp_path / "spool"), Ledger(tmp_path / "state"), Wake()
    spool.open()
    ledger.open()
    queue = Queue(Config(), spool, ledger, wake, Metrics())
    first = ledger.save(make_job())
    queue.retry_at(JOB_ID, 50.0)
    assert queue.take(49.0) is None
    assert queue.take(50.0) == first
    ledger.save(advance(first, JobState.QUARANTINED, NOW))
    second = ledger.save(make_job(id=OTHER_ID))
    queue.retry_at(OTHER_ID, 60.0)
    assert queue._due == {OTHER_ID: 60.0}
    assert queue.take(60.0) == second
    queue.close()
    wake.close()


@pytest.mark.parametrize("refused", ["reason", "move"])
def test_what_is_no_file_and_can_not_be_moved_away_is_tried_again_and_spoken_of_once(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spool, ledger, wake = Spool(tmp_path / "spool"), Ledger(tmp_path / "state"), Wake()
    spool.open()
    ledger.open()
    metrics = Metrics()
    queue = Queue(
        msgspec.structs.replace(Config(), intake=IntakeConfig(quiet_seconds=0.0)), spool, ledger, wake, metrics
    )
    os.mkfifo(spool.incoming / "pipe")
    num_tries = 0

    def full(*_: object, **__: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(fsio, "write_atomic" if refused == "reason" else "move", full)
        for now in (0.0, 10.0, 59.0, 60.0, 110.0):
            queue.scan_at = now
            queue.look(now)
            assert metrics.registry.get_sample_value("retraind_spool_files", {"state": "incoming_refused"}) == 1
            assert os.listdir(spool.quarantined) == []
    assert num_tries == 2
    assert caplog.text.count("can not be moved away (No space left on device)") == 1
    queue.scan_at = 120.0
    queue.look(120.0)
    assert sorted(os.listdir(spool.quarantined)) == ["pipe", "pipe.reason.json"]
    assert os.listdir(spool.incoming) == []
    queue.close()
    wake.close()
