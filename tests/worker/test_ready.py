"""The real worker that waits for its order: what it holds until then, and that its job is like any other's."""

import os
import socket
import subprocess
import sys

import pytest
from test_worker_main import DEADLINE_SECONDS, PACKAGE, Supervisor, write_csv

from retraind import errors, events


class Kept:
    """A worker without a job, and the supervisor's end of its channel."""

    def __init__(self, *command):
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(DEADLINE_SECONDS)
        command = command or (sys.executable, "-s", str(PACKAGE / "worker"), events.READY_ARGUMENT)
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self):
        self.channel.close()
        out, log = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, out.decode(), log.decode()

    def open_files(self):
        directory = f"/proc/{self.process.pid}/fd"
        return {os.readlink(f"{directory}/{fd}") for fd in os.listdir(directory)}


@pytest.fixture
def kept():
    worker = Kept()
    yield worker
    worker.process.kill()
    worker.end()


def test_it_holds_nothing_but_its_channel_and_its_job_gives_the_weights_of_any_other(kept, tmp_path):
    supervisors = []
    for name in ("cold", "kept"):
        (tmp_path / name).mkdir()
        supervisors.append(Supervisor(tmp_path / name))
    cold, ready = supervisors
    dataset = write_csv(tmp_path / "node.csv")
    cold.start(dataset, epochs=2)
    assert cold.finish() == 0, cold.log()

    assert kept.channel.recv(len(events.READY_LINE)) == events.READY_LINE
    held = {path for path in kept.open_files() if not path.startswith(("socket:", "pipe:", "/dev/"))}
    assert held == set(), "no dataset, no GPU, no file"
    assert not [path for path in kept.open_files() if "nvidia" in path]
    ready.start(dataset, epochs=2, command=("true",))  # writes the order
    ready.process.wait()
    ready.process = kept.process
    kept.channel.sendall(f"{tmp_path}/kept/order.json\n".encode())
    ready.read(until=events.Hello)
    assert os.readlink(f"/proc/{kept.process.pid}/fd/0") == os.devnull
    assert ready.finish() == 0
    assert ready.events[-1].weights_sha256 == cold.events[-1].weights_sha256
    assert [type(event) for event in ready.events if not isinstance(event, events.Heartbeat | events.Progress)] == [
        type(event) for event in cold.events if not isinstance(event, events.Heartbeat | events.Progress)
    ]
    for supervisor in supervisors:
        supervisor.close()


def test_it_ends_without_a_word_when_no_job_will_come(kept):
    assert kept.channel.recv(len(events.READY_LINE)) == events.READY_LINE
    assert kept.end() == (0, "", "")


def test_what_a_job_says_of_its_device_is_still_free_to_decide():
    script = """
import os, sys
from retraind.worker.ready import wait_for_order
assert wait_for_order() is not None
assert {"torch", "pandas", "retraind.worker.train", "retraind.worker.scorer"} <= set(sys.modules)
import torch
assert not torch.cuda.is_initialized()
os.environ["CUDA_VISIBLE_DEVICES"] = ""
assert torch.cuda.device_count() == 0
"""
    worker = Kept(sys.executable, "-W", "error", "-c", script)
    worker.channel.sendall(b"/somewhere\n")
    assert worker.channel.recv(len(events.READY_LINE)) == events.READY_LINE
    status, _, log = worker.end()
    assert status == 0, log


def test_an_interpreter_that_lacks_a_library_ends_and_names_it():
    script = (
        "import sys; sys.modules['torch'] = None; from retraind.worker.main import main; sys.exit(main(['--ready']))"
    )
    status, out, log = Kept(sys.executable, "-c", script).end()
    assert status == errors.HostError.exit_status
    assert "torch" in log
    assert out == ""


def test_a_standard_input_that_is_no_channel_is_refused():
    command = [sys.executable, "-s", str(PACKAGE / "worker"), events.READY_ARGUMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == errors.HostError.exit_status
    assert b"can not be kept ready" in done.stderr
