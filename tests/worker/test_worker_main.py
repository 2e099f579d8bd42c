"""The worker as a process: an order in, events and a candidate out, and one exit status for every way to end."""

import hashlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import retraind
from retraind import errors, events, report
from retraind.config import DataConfig, TrainingConfig
from retraind.job import Order
from retraind.worker import model

PACKAGE = Path(retraind.__file__).parent
DEADLINE_SECONDS = 120


class Supervisor:
    """The other end: listens, starts one worker, and reads what it sends."""

    def __init__(self, directory):
        self.directory = directory
        self.work_dir = directory / "work"
        self.work_dir.mkdir()
        self.path = directory / "events.sock"
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # By way of a descriptor, because a test's directory may be too long for an address.
        fd = os.open(directory, os.O_RDONLY)
        self.server.bind(f"/proc/self/fd/{fd}/events.sock")
        os.close(fd)
        self.server.listen(1)
        self.connection = None
        self.process = None
        self.buffer = b""
        self.envelopes = []
        self.events = []

    def start(
        self, dataset, *, command=(sys.executable, "-m", "retraind.worker"), device="cpu", environ=None, **training
    ):
        order = Order(
            job="20261130T225212Z-1f3a",
            attempt=2,
            datasets=[str(dataset)],
            work_dir=str(self.work_dir),
            socket=str(self.path),
            device=device,
            training=TrainingConfig(**training),
            data=DataConfig(),
            log_level="info",
        )
        order_file = self.directory / "order.json"
        order_file.write_bytes(msgspec.json.encode(order))
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(order_file)], stderr=log, cwd="/", env={**os.environ, **(environ or {})}
            )

    def log(self):
        return (self.directory / "log").read_text()

    def read(self, until=None):
        """Events up to the first of a kind, or to the end of the connection."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        if self.connection is None:
            self.wait_readable(self.server, deadline)
            self.connection, _ = self.server.accept()
        while True:
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                envelope, event = events.decode(line)
                self.envelopes.append(envelope)
                self.events.append(event)
                if until is not None and isinstance(event, until):
                    return event
            self.wait_readable(self.connection, deadline)
            data = self.connection.recv(65536)
            if not data:
                return None
            self.buffer += data

    def wait_readable(self, endpoint, deadline):
        with selectors.DefaultSelector() as selector:
            selector.register(endpoint, selectors.EVENT_READ)
            assert selector.select(deadline - time.monotonic()), f"silent worker; its log:\n{self.log()}"

    def finish(self):
        """Reads to the end; the exit status."""
        self.read()
        return self.process.wait(DEADLINE_SECONDS)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.connection is not None:
            self.connection.close()
        self.server.close()


@pytest.fixture
def supervisor(tmp_path):
    end = Supervisor(tmp_path)
    yield end
    end.close()


def write_csv(path, num_rows=1000, num_metrics=5):
    rows = np.random.default_rng(3).normal(50, 7, (num_rows, num_metrics))
    header = ",".join(f"metric_{index}" for index in range(num_metrics))
    np.savetxt(path, rows, fmt="%.6f", delimiter=",", header=header, comments="")
    return path


@pytest.fixture
def dataset(tmp_path):
    return write_csv(tmp_path / "node.csv")


def test_a_job_ends_with_a_candidate_on_disk_that_a_consumer_can_load(supervisor, dataset):
    supervisor.start(dataset, epochs=3, batch_size=100)
    assert supervisor.finish() == 0, supervisor.log()

    data = (supervisor.work_dir / "weights.pt").read_bytes()
    candidate = msgspec.json.decode((supervisor.work_dir / "candidate.json").read_bytes(), type=report.Candidate)
    finished = supervisor.events[-1]
    assert isinstance(finished, events.Finished)
    assert finished.weights_sha256 == candidate.weights_sha256 == hashlib.sha256(data).hexdigest()
    assert finished.peak_bytes > 100 * 2**20
    assert candidate.weights_bytes == len(data)
    assert candidate.shape == report.ModelShape(input_dim=25, hidden_dim=24, latent_dim=8, window=5)
    assert candidate.tensors == candidate.expected
    assert candidate.evaluation.num_heldout_rows == 100
    assert candidate.training.num_steps == 27
    assert candidate.dataset.num_rows == 1000
    assert candidate.dataset.metric_names == [f"metric_{index}" for index in range(5)]
    assert candidate.versions["torch"] == torch.__version__
    assert candidate.versions["retraind"] == retraind.__version__
    assert [candidate.checks] == [event.checks for event in supervisor.events if isinstance(event, events.Checked)]
    loaded = model.build(25, seed=1)
    loaded.load_state_dict(torch.load(io.BytesIO(data), weights_only=True), strict=True)
    # The cache of rows is gone: what is left is the result.
    assert sorted(path.name for path in supervisor.work_dir.iterdir()) == ["candidate.json", "scorer.pt", "weights.pt"]


def test_the_events_tell_the_job_from_hello_to_one_last_word(supervisor, dataset):
    supervisor.start(dataset)
    assert supervisor.finish() == 0, supervisor.log()
    assert isinstance(supervisor.events[0], events.Hello)
    assert supervisor.events[0].pid == supervisor.process.pid
    stages = [event.name for event in supervisor.events if isinstance(event, events.Stage)]
    assert stages == ["preflight", "ingest", "import", "train", "evaluate"]
    assert any(isinstance(event, events.Progress) for event in supervisor.events)
    (checked,) = [event for event in supervisor.events if isinstance(event, events.Checked)]
    assert {check.name for check in checked.checks} >= {"host.memory", "host.disk", "host.cpu", "gpu.present"}
    last = [event for event in supervisor.events if isinstance(event, events.Finished | events.Failed)]
    assert last == [supervisor.events[-1]]
    assert [envelope.seq for envelope in supervisor.envelopes] == list(range(len(supervisor.envelopes)))
    assert {(e.job, e.attempt) for e in supervisor.envelopes} == {("20261130T225212Z-1f3a", 2)}


def test_the_same_file_gives_the_same_weights_bit_for_bit(tmp_path, dataset):
    digests = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        supervisor = Supervisor(tmp_path / name)
        supervisor.start(dataset, batch_size=64)
        assert supervisor.finish() == 0, supervisor.log()
        digests.add(supervisor.events[-1].weights_sha256)
        supervisor.close()
    assert len(digests) == 1


def test_a_bad_file_fails_with_its_familys_status_and_without_torch(supervisor, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_bytes(b"")
    supervisor.start(path)
    assert supervisor.finish() == errors.DataError.exit_status
    failed = supervisor.events[-1]
    assert isinstance(failed, events.Failed)
    assert failed.code == "empty"
    assert "import" not in [event.name for event in supervisor.events if isinstance(event, events.Stage)]
    assert list(supervisor.work_dir.iterdir()) == []


def test_a_machine_without_the_gpu_that_is_asked_for_defers_the_job(supervisor, dataset, tmp_path):
    (tmp_path / "sysroot").mkdir()
    supervisor.start(dataset, device="cuda", environ={"RETRAIND_SYSROOT": str(tmp_path / "sysroot")})
    assert supervisor.finish() == errors.HostError.exit_status
    failed = supervisor.events[-1]
    assert failed.code == "preflight_failed"
    assert "gpu.present" in failed.message
    assert failed.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_job_on_a_gpu_has_the_figures_of_that_gpu_and_what_torch_says_of_it(supervisor, dataset):
    supervisor.start(dataset, device="cuda", epochs=1)
    assert supervisor.finish() == 0, supervisor.log()
    candidate = msgspec.json.decode((supervisor.work_dir / "candidate.json").read_bytes(), type=report.Candidate)
    assert candidate.training.device.startswith("cuda")
    assert {check.name: check.status for check in candidate.checks}["cuda.context"] == "pass"
    assert len([event for event in supervisor.events if isinstance(event, events.Checked)]) == 2
    if any(check.name == "driver.nvml" and check.status == "pass" for check in candidate.checks):
        assert [gpu.is_chosen for gpu in candidate.gpus].count(True) == 1


def test_sigterm_ends_training_between_two_steps(supervisor, dataset):
    supervisor.start(dataset, epochs=100_000, batch_size=64)
    supervisor.read(until=events.Progress)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.finish() == errors.Interrupted.exit_status
    assert supervisor.events[-1].code == "terminated"
    assert isinstance(supervisor.events[-2], events.Checkpointed)
    assert [path.name for path in supervisor.work_dir.iterdir()] == ["checkpoint"]


def test_ctrl_c_on_a_terminal_is_left_to_the_supervisor(supervisor, dataset):
    supervisor.start(dataset, epochs=100_000, batch_size=64)
    supervisor.read(until=events.Progress)
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.read(until=events.Progress)
    supervisor.read(until=events.Progress)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.finish() == errors.Interrupted.exit_status


def test_a_worker_without_an_order_says_how_it_is_called():
    run = subprocess.run([sys.executable, "-m", "retraind.worker"], capture_output=True, text=True, check=False)
    assert run.returncode == errors.UsageError.exit_status
    assert "ORDER.json" in run.stderr


def test_a_long_training_is_never_silent_for_long(supervisor, dataset):
    supervisor.start(dataset, epochs=100_000, batch_size=64)
    supervisor.read(until=events.Progress)
    first = supervisor.envelopes[-1].t
    for _ in range(3):
        supervisor.read(until=events.Progress | events.Heartbeat)
    assert supervisor.envelopes[-1].t - first >= 1.0  # three at half a second each, and no more often than that


def test_a_worker_whose_supervisor_is_gone_stops_by_itself(supervisor, dataset):
    supervisor.start(dataset, epochs=100_000, batch_size=64)
    supervisor.read(until=events.Progress)
    supervisor.connection.close()
    assert supervisor.process.wait(DEADLINE_SECONDS) == errors.Interrupted.exit_status
    assert "Traceback" not in supervisor.log()
    assert [path.name for path in supervisor.work_dir.iterdir()] == ["checkpoint"]


def test_a_worker_that_finds_no_supervisor_does_nothing(supervisor, dataset):
    supervisor.server.close()
    supervisor.start(dataset)
    assert supervisor.process.wait(DEADLINE_SECONDS) == errors.Interrupted.exit_status
    assert list(supervisor.work_dir.iterdir()) == []


def test_the_worker_dies_with_its_parent(supervisor, dataset):
    # A shell in between is the parent; it is killed, and the worker must not outlive it.
    shell = ("/bin/sh", "-c", f'"{sys.executable}" -m retraind.worker "$0"; exit $?')
    supervisor.start(dataset, command=shell, epochs=100_000, batch_size=64)
    hello = supervisor.read(until=events.Hello)
    assert hello.pid != supervisor.process.pid
    supervisor.read(until=events.Progress)
    supervisor.process.kill()
    supervisor.process.wait(DEADLINE_SECONDS)
    supervisor.read()  # to the end of the connection, which only the worker's death brings
    assert not isinstance(supervisor.events[-1], events.Finished | events.Failed)


def test_sigabrt_leaves_the_stacks_in_the_log(supervisor, dataset):
    supervisor.start(dataset, epochs=100_000, batch_size=64)
    supervisor.read(until=events.Progress)
    supervisor.process.send_signal(signal.SIGABRT)
    assert supervisor.finish() == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in supervisor.log()
    assert "in train" in supervisor.log()


def test_a_full_disk_is_the_machines_fault(tmp_path):
    from retraind.worker.main import system_errors_named

    with (
        pytest.raises(errors.HostError) as caught,
        system_errors_named(),
        Path("/dev/full").open("wb", buffering=0) as f,
    ):
        f.write(b"x")
    assert caught.value.code == "disk_full"
    with pytest.raises(FileNotFoundError), system_errors_named():
        (tmp_path / "gone").read_bytes()
    with pytest.raises(errors.ResourceError), system_errors_named():
        bytearray(2**62)


def test_a_crash_sends_no_last_event_and_leaves_a_traceback(supervisor, dataset):
    (supervisor.work_dir / "candidate.json").mkdir()  # nothing can be renamed over a directory
    supervisor.start(dataset, epochs=1)
    assert supervisor.finish() == 1
    assert not isinstance(supervisor.events[-1], events.Finished | events.Failed)
    assert "Traceback" in supervisor.log()


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Another interpreter, with this one's libraries but for retraind; a function that leaves out more."""
    import msgspec

    site = Path(msgspec.__file__).parents[1]

    def build(*left_out):
        directory = tmp_path_factory.mktemp("venv")
        venv.create(directory, symlinks=True)
        target = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        for entry in site.iterdir():
            if not entry.name.startswith(("retraind", "__editable__", "_virtualenv", *left_out)):
                (target / entry.name).symlink_to(entry)
        python = str(directory / "bin/python")
        found = subprocess.run([python, "-I", "-c", "import retraind"], capture_output=True, check=False)
        assert b"No module named 'retraind'" in found.stderr
        return python

    return build


def test_another_interpreter_runs_the_worker_from_where_it_lies(supervisor, dataset, bare_python):
    python = bare_python()
    supervisor.start(dataset, command=(python, "-s", str(PACKAGE / "worker")), environ={"PYTHONPATH": ""})
    assert supervisor.finish() == 0, supervisor.log()
    assert isinstance(supervisor.events[-1], events.Finished)


def test_an_interpreter_without_torch_is_the_machines_fault(supervisor, dataset, bare_python):
    python = bare_python("torch", "functorch")
    supervisor.start(dataset, command=(python, "-s", str(PACKAGE / "worker")), environ={"PYTHONPATH": ""})
    assert supervisor.finish() == errors.HostError.exit_status
    assert supervisor.events[-1].code == "no_torch"
    assert python in supervisor.events[-1].message
    assert "worker.python" in supervisor.events[-1].remedy


def test_an_interpreter_without_numpy_is_the_machines_fault(supervisor, dataset, bare_python):
    python = bare_python("numpy")
    supervisor.start(dataset, command=(python, "-s", str(PACKAGE / "worker")), environ={"PYTHONPATH": ""})
    assert supervisor.finish() == errors.HostError.exit_status
    assert supervisor.events[-1].code == "no_numpy"
    assert "numpy" in supervisor.events[-1].message


def test_an_interpreter_without_msgspec_says_so_and_is_unavailable(supervisor, dataset, bare_python):
    python = bare_python("msgspec")
    supervisor.start(dataset, command=(python, "-s", str(PACKAGE / "worker")), environ={"PYTHONPATH": ""})
    assert supervisor.process.wait(DEADLINE_SECONDS) == errors.HostError.exit_status
    assert "msgspec" in supervisor.log()
    assert "Traceback" not in supervisor.log()


def test_the_workers_directory_is_not_on_the_path(supervisor, dataset, tmp_path, bare_python):
    # A module that the other interpreter loads at its start reports the path when torch is looked for; `import model`
    # would find ours.
    python = bare_python()
    target = Path(python).parents[1] / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (target / "report.pth").write_text("import report_path\n")
    (target / "report_path.py").write_text(
        "import json, sys\n"
        "class Reporter:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        f"            open({str(tmp_path / 'path.json')!r}, 'w').write(json.dumps(sys.path))\n"
        "sys.meta_path.insert(0, Reporter())\n"
    )
    supervisor.start(dataset, command=(python, "-s", str(PACKAGE / "worker")), environ={"PYTHONPATH": ""})
    assert supervisor.finish() == 0, supervisor.log()
    seen = [Path(entry).resolve() for entry in json.loads((tmp_path / "path.json").read_text()) if entry]
    assert PACKAGE / "worker" not in seen
    assert PACKAGE.parent not in seen


def test_a_process_that_leaves_waits_for_nothing_takes_its_children_along_and_loses_no_line():
    script = """
import multiprocessing, sys, threading, time
from retraind.worker.__main__ import leave
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
print(child.pid)
threading.Thread(target=time.sleep, args=(600,)).start()  # as one in a driver that never answers
print("the last line", file=sys.stderr)
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (75, "the last line\n")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while Path(f"/proc/{done.stdout.strip()}").exists():
        assert time.monotonic() < deadline, "a child that outlives it"


def test_a_socket_path_longer_than_an_address_is_reached(tmp_path):
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    supervisor = Supervisor(directory)
    try:
        supervisor.start(write_csv(directory / "node.csv"), epochs=1)
        assert supervisor.finish() == 0, supervisor.log()
    finally:
        supervisor.close()
