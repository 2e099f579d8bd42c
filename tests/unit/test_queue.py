"""The pauses between attempts: kept for as long as their job is open, and no longer."""

from pathlib import Path

from builders import JOB_ID, NOW, OTHER_ID, make_job

from retraind.config import Config
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
    wake.close()
