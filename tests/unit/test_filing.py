"""What becomes of a trained job: the verdict on it when the service has forgotten what its worker said."""

from pathlib import Path

import msgspec
import pytest
from builders import JOB_ID, OTHER_ID, leave_candidate, make_job

from retraind.config import Config, GateConfig, IntakeConfig
from retraind.job import JobState
from retraind.report import Drift
from retraind.supervisor.filing import Filing
from retraind.supervisor.hook import Hook
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.publish import Publisher
from retraind.supervisor.spool import Spool


@pytest.mark.parametrize(("duplicates", "state"), [("skip", JobState.DUPLICATE), ("train", JobState.PUBLISHED)])
def test_a_trained_job_whose_content_was_published_before_ends_as_intake_duplicates_says(
    tmp_path: Path, duplicates: str, state: JobState
) -> None:
    """The service was killed, or its disk was full, between the worker's `ingested` and the end of its job."""
    spool, ledger = Spool(tmp_path / "spool"), Ledger(tmp_path / "state")
    publisher = Publisher(tmp_path / "models", "model")
    for part in (spool, ledger, publisher):
        part.open()
    candidate = leave_candidate(ledger.work_dir(OTHER_ID))
    ledger.save(make_job(state=JobState.PUBLISHED, sha256=candidate.dataset.sha256, settings="s"))
    ledger.save(make_job(id=OTHER_ID, state=JobState.TRAINED, settings="s"))
    metrics = Metrics()
    filing = Filing(spool, ledger, publisher, Hook(ledger.state_dir, metrics), metrics)
    filing.publish(Config(intake=IntakeConfig(duplicates=duplicates)))
    ended = {job.id: job for job in ledger.load()}
    assert ended[OTHER_ID].state is state
    assert (publisher.live() is not None) == (state is JobState.PUBLISHED)
    if state is JobState.DUPLICATE:
        assert JOB_ID in str(ended[OTHER_ID].reason)


@pytest.mark.parametrize("limit", [0.1, None], ids=["rejected", "published"])
def test_drift_is_told_whether_the_model_is_published_or_not_and_after_a_restart(
    tmp_path: Path, limit: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    spool, ledger = Spool(tmp_path / "spool"), Ledger(tmp_path / "state")
    publisher = Publisher(tmp_path / "models", "model")
    for part in (spool, ledger, publisher):
        part.open()
    candidate = leave_candidate(ledger.work_dir(JOB_ID))
    found = Drift(version="000041-aaaaaaaaaaaa", num_rows=2000, num_alarms=500, expected_share=0.001)
    candidate = msgspec.structs.replace(
        candidate, evaluation=msgspec.structs.replace(candidate.evaluation, drift=found)
    )
    (ledger.work_dir(JOB_ID) / "candidate.json").write_bytes(msgspec.json.encode(candidate))
    ledger.save(make_job(state=JobState.TRAINED, settings="s"))
    metrics = Metrics()
    config = Config(gate=GateConfig(max_heldout_loss=limit))
    Filing(spool, ledger, publisher, Hook(ledger.state_dir, metrics), metrics).publish(config)
    assert (publisher.live() is not None) == (limit is None)
    assert "the data has drifted, or a fault lasts in it: 25 % of 2,000 rows are above" in caplog.text
    assert b"retraind_drift_alarm_share 0.25" in metrics.render("", "")[0]
    if limit is None:
        later = Metrics()
        Filing(spool, ledger, publisher, Hook(ledger.state_dir, later), later).watch_live(config)
        assert b"retraind_drift_alarm_share 0.25" in later.render("", "")[0]
