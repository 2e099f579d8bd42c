"""Training that is broken off and gone on with: bit for bit what it would have been, or from the start."""

import logging
import random
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from test_train import CPU, Recorder, write_rows
from test_worker_main import Supervisor, write_csv

from retraind import errors, events, report
from retraind.config import DataConfig, TrainingConfig, decisive
from retraind.worker import checkpoint, model, step, train

KILLED_WORKER = Path(__file__).resolve().parents[1] / "fakes" / "killed_worker.py"
# What the clock says, and how often it went on: all else of the report is that of a job that nobody broke off.
OF_THE_ATTEMPTS = {"seconds": 0.0, "rows_per_second": 0.0, "num_resumes": 0}


def identity(settings=TrainingConfig(), **changes):  # noqa: B008  (frozen)
    facts = {
        "job": "20261130T225212Z-1f3a", "dataset": "ab" * 32, "metric_names": list("abcdef"), "num_rows": 577,
        "device": "cpu", "precision": "float32", "training": decisive(settings), "data": DataConfig(),
    }  # fmt: skip
    return checkpoint.identity_of(**{**facts, **changes})


class Keeping(checkpoint.Checkpoints):
    """Keeps a checkpoint after every step, and all of them."""

    def __init__(self, path, identity):
        super().__init__(path, identity, 60)
        self.kept = []

    def is_due(self):
        return True

    def write(self, state):
        num_bytes = super().write(state)
        self.kept.append(self._path.read_bytes())
        return num_bytes


class Listener(Recorder):
    """Hears of checkpoints too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sent = []

    def send(self, event):
        self.sent.append(event)


def outcome(trained, told):
    """Weights and report, without what an interruption may change."""
    return model.serialise(trained), msgspec.structs.replace(told, **OF_THE_ATTEMPTS)


FORMS = {
    "by hand": {},
    "by hand, last batch merged": {"num_rows": 129},
    "autograd": {"form": step.AutogradStep},
    "torch's own AdamW": {"form": step.AutogradStep, "optimizer": torch.optim.AdamW},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16 with skipped steps": {"precision": "fp16", "scale": 100, "num_rows": 200, "batch_size": 10},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_training_that_goes_on_after_any_step_ends_bit_for_bit_as_if_it_had_not_stopped(tmp_path, monkeypatch, form):
    if "form" in form:
        monkeypatch.setattr(train, "make_step", form["form"])
    if "optimizer" in form:
        monkeypatch.setattr(step, "FusedAdamW", form["optimizer"])
    rows = write_rows(tmp_path / "rows", form.get("num_rows", 150), scale=form.get("scale", 1.0))
    settings = TrainingConfig(
        epochs=3, batch_size=form.get("batch_size", 64), precision=form.get("precision", "auto"), learning_rate=0.01
    )
    expected = outcome(*train.train(rows, settings, CPU, Listener()))
    keeping = Keeping(tmp_path / "checkpoint", identity(settings))
    assert outcome(*train.train(rows, settings, CPU, Listener(), keeping)) == expected, "keeping changes nothing"
    assert len(keeping.kept) == expected[1].num_steps
    if "scale" in form:
        assert 0 < expected[1].num_skipped_steps < expected[1].num_steps
    for number, kept in enumerate(keeping.kept, 1):
        path = tmp_path / f"checkpoint-{number}"
        path.write_bytes(kept)
        listener = Listener()
        trained, told = train.train(
            rows, settings, CPU, listener, checkpoint.Checkpoints(path, identity(settings), every_seconds=1e9)
        )
        assert outcome(trained, told) == expected, f"after step {number}"
        assert told.num_resumes == 1
        assert listener.sent[0].num_steps == number
        assert len(listener.shares) == expected[1].num_steps - number, "no step was taken twice"


def test_training_draws_from_no_random_generator_that_would_have_to_be_kept(tmp_path):
    rows = write_rows(tmp_path / "rows", 150)
    before = torch.random.get_rng_state()
    train.train(rows, TrainingConfig(batch_size=64), CPU, Listener())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_stop_is_kept_and_told_with_the_step_that_was_done(tmp_path):
    rows = write_rows(tmp_path / "rows", 150)
    settings = TrainingConfig(epochs=50, batch_size=64)
    listener = Listener(stop_after=25)
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoint", identity(settings), every_seconds=1e9)
    with pytest.raises(errors.Interrupted):
        train.train(rows, settings, CPU, listener, checkpoints)
    (kept,) = listener.sent
    assert isinstance(kept, events.Checkpointed)
    assert kept.num_bytes == (tmp_path / "checkpoint").stat().st_size
    assert checkpoints.read()["run"]["num_steps"] == kept.num_steps > 3
    assert (tmp_path / "checkpoint").stat().st_mode & 0o777 == 0o640


def keep_one(path, settings):
    """A checkpoint of a training that was stopped."""
    rows = write_rows(path.with_name("rows"), 150)
    with pytest.raises(errors.Interrupted):
        train.train(rows, settings, CPU, Listener(stop_after=9), checkpoint.Checkpoints(path, identity(settings), 1e9))
    return rows


DAMAGES = {
    "a byte flipped": lambda data, rng: flip(data, rng.randrange(len(data))),
    "a byte of its digest flipped": lambda data, rng: flip(data, rng.randrange(64)),
    "cut short": lambda data, rng: data[: rng.randrange(1, len(data))],
    "empty": lambda _data, _rng: b"",
    "one byte longer": lambda data, _rng: data + b"\0",
    "noise": lambda data, rng: rng.randbytes(len(data)),
}


def flip(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_ignored_with_one_line_and_training_begins_at_the_start(tmp_path, caplog, damage):
    settings = TrainingConfig(epochs=3, batch_size=64)
    path = tmp_path / "checkpoint"
    rows = keep_one(path, settings)
    whole = path.read_bytes()
    expected = outcome(*train.train(rows, settings, CPU, Listener()))
    rng = random.Random(5)
    for _ in range(10):
        path.write_bytes(damage(whole, rng))
        caplog.clear()
        listener = Listener()
        trained, told = train.train(
            rows, settings, CPU, listener, checkpoint.Checkpoints(path, identity(settings), every_seconds=1e9)
        )
        assert outcome(trained, told) == expected
        assert (told.num_resumes, listener.sent) == (0, [])
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "training from the start" in line
        assert "damaged" in line


def foreign(**changes):
    return msgspec.structs.replace(identity(), **changes)


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (identity(job="20261130T225213Z-2b4c"), "job"),
        (identity(dataset="cd" * 32), "dataset"),
        (identity(num_rows=576), "num_rows"),
        (identity(metric_names=list("abcdeg")), "metric_names"),
        (identity(device="cuda"), "device"),
        (identity(precision="bf16"), "precision"),
        (identity(data=DataConfig(max_bad_share=0.5)), "data.max_bad_share"),
        (foreign(torch="2.5"), "torch"),
        (foreign(schema=checkpoint.SCHEMA + 1), "schema"),
        *(
            (identity(TrainingConfig(**{name: value})), f"training.{name}")
            for name, value in {
                "epochs": 6, "batch_size": 1024, "learning_rate": 0.1, "weight_decay": 0.0, "seed": 1,
                "precision": "float32", "num_workers": 1, "num_threads": 2, "holdout_share": 0.2,
            }.items()
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_checkpoint_of_another_training_is_ignored_and_the_difference_is_said(tmp_path, caplog, wanted, word):
    path = tmp_path / "checkpoint"
    path.write_bytes(checkpoint.encode(identity(), {"weights": torch.zeros(3)}))
    assert checkpoint.Checkpoints(path, wanted, 60).read() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "training from the start" in line
    assert f"{word} was " in line
    assert checkpoint.Checkpoints(path, identity(TrainingConfig(checkpoint_seconds=5)), 60).read() is not None


def test_a_checkpoint_of_another_format_is_ignored(tmp_path, caplog):
    line = b'{"schema":2,"mood":"good"}\n'
    path = tmp_path / "checkpoint"
    path.write_bytes(checkpoint.fsio.sha256_of_bytes(line).encode() + b"\n" + line)
    assert checkpoint.Checkpoints(path, identity(), 60).read() is None
    assert "another version" in caplog.text


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_nothing_in_a_checkpoint_is_executed(tmp_path, caplog):
    path = tmp_path / "checkpoint"
    path.write_bytes(checkpoint.encode(identity(), {"trap": Trap()}))
    assert checkpoint.Checkpoints(path, identity(), 60).read() is None
    assert "can not load it" in caplog.text


def test_a_checkpoint_that_can_not_be_written_costs_a_warning_and_keeps_the_one_before(tmp_path, monkeypatch, caplog):
    path = tmp_path / "checkpoint"
    checkpoints = checkpoint.Checkpoints(path, identity(), 60)
    assert checkpoints.write({"number": 1}) == path.stat().st_size

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.fsio.os, "fsync", full)
    assert checkpoints.write({"number": 2}) == 0
    assert "No space left" in caplog.text
    assert checkpoints.read() == {"number": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path)], ids=["dir", "loop"])
def test_what_is_no_readable_file_is_ignored(tmp_path, caplog, make):
    make(tmp_path / "checkpoint")
    assert checkpoint.Checkpoints(tmp_path / "checkpoint", identity(), 60).read() is None
    assert "training from the start" in caplog.text


class Job:
    """One job, attempted again and again in one work directory."""

    def __init__(self, directory, num_rows, **training):
        directory.mkdir()
        self.directory, self.training = directory, training
        self.dataset = write_csv(directory / "node.csv", num_rows)
        self.work_dir = directory / "work"
        self.work_dir.mkdir()
        self.num_attempts = 0
        self.events = []
        self.log = ""

    def attempt(self, plan=""):
        """Exit status and events of a worker that is killed as planned."""
        self.num_attempts += 1
        directory = self.directory / str(self.num_attempts)
        directory.mkdir()
        (directory / "plan").write_text(plan)
        end = Supervisor(directory)
        end.work_dir = self.work_dir
        try:
            end.start(
                self.dataset, command=(sys.executable, str(KILLED_WORKER)),
                environ={"RETRAIND_TEST_PLAN": str(directory / "plan")}, **self.training,
            )  # fmt: skip
            status = end.finish()
        finally:
            end.close()
        self.events, self.log = end.events, end.log()
        return status

    def resumed_at(self):
        """The step from which the last attempt went on; 0 for the start."""
        return next((event.num_steps for event in self.events if isinstance(event, events.Resumed)), 0)

    def candidate(self):
        """All that a job is measured by, but for its times and the machine's state."""
        candidate = msgspec.json.decode((self.work_dir / "candidate.json").read_bytes(), type=report.Candidate)
        return msgspec.structs.replace(
            candidate, training=msgspec.structs.replace(candidate.training, **OF_THE_ATTEMPTS), checks=[]
        )


# 577 rows to train on: nine batches of 64, the last with one row more. 579: a tenth batch of three.
PROCESSES = {
    "by hand": ("", 641, {}),
    "autograd": ("autograd", 643, {}),
    "fp16": ("", 641, {"precision": "fp16"}),
    "bf16": ("", 643, {"precision": "bf16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "num_rows", "settings"), PROCESSES.values(), ids=PROCESSES)
def test_a_worker_killed_again_and_again_ends_bit_for_bit_as_one_that_was_not(tmp_path, form, num_rows, settings):
    settings = {"epochs": 4, "batch_size": 64, **settings}
    undisturbed = Job(tmp_path / "undisturbed", num_rows, **settings)
    assert undisturbed.attempt(form) == 0, undisturbed.log
    job = Job(tmp_path / "killed", num_rows, **settings)
    middle = random.Random(17).choice([4, 5])
    # Each kill, and the step from which that attempt had gone on.
    num_steps = 36 if num_rows == 641 else 40
    for point, resumed_at in [
        ("step 2", 0),  # before the first checkpoint
        ("rename 2", 0),  # while the second is written: the first one stays
        ("keep 1", 3),  # right after one
        (f"step {middle}", 6),  # in the middle of an epoch
        ("step 26", 9),  # in the last epoch
        ("evaluate 1", 33),
    ]:
        assert job.attempt(f"{form} {point}") == -9, job.log
        assert job.resumed_at() == resumed_at, point
        assert not (job.work_dir / "candidate.json").exists()
    assert job.attempt(form) == 0, job.log
    assert job.resumed_at() == num_steps - num_steps % 3
    assert job.candidate() == undisturbed.candidate()
    assert sorted(path.name for path in job.work_dir.iterdir()) == ["candidate.json", "scorer.pt", "weights.pt"]


@pytest.mark.slow
def test_a_worker_killed_before_its_candidate_is_whole_trains_the_rest_again(tmp_path):
    undisturbed = Job(tmp_path / "undisturbed", 300, epochs=2, batch_size=64)
    assert undisturbed.attempt() == 0
    job = Job(tmp_path / "killed", 300, epochs=2, batch_size=64)
    assert job.attempt("candidate 1") == -9
    assert job.attempt() == 0
    assert job.resumed_at() == 9
    assert job.candidate() == undisturbed.candidate()


@pytest.mark.slow
def test_a_retry_with_half_the_batch_begins_at_the_start_and_without_the_key_nothing_is_kept(tmp_path):
    job = Job(tmp_path / "job", 300, epochs=2, batch_size=64)
    assert job.attempt("keep 1") == -9
    job.training["batch_size"] = 32
    assert job.attempt("step 1") == -9
    assert job.resumed_at() == 0
    assert "training.batch_size was 64, now it is 32" in job.log
    job.training = {"epochs": 2, "batch_size": 64, "checkpoint_seconds": None}
    (job.work_dir / "checkpoint").write_bytes(b"")
    assert job.attempt("keep 1") == 0
    assert "checkpoint" not in job.log
