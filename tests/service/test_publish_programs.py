"""The operator's programs around a publication, and the service beside an operator who changes the live version."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Service, eventually

from retraind.consumer import open_live

MakeService = Callable[..., Service]


@pytest.fixture
def make_service(tmp_path: Path):
    made: list[Service] = []

    def make(**sections: dict[str, object]) -> Service:
        made.append(Service(tmp_path, **sections))
        return made[-1]

    yield make
    for service in made:
        service.close()


def hook(root: Path, then: str = "") -> list[str]:
    """A program that notes what it was told, then does something."""
    log = shlex.quote(str(root / "hook.log"))
    return ["/bin/sh", "-c", f'echo "$VERSION $SHA256 $PATH_OF_VERSION ${{NOTIFY_SOCKET-}}" >> {log}; {then}']


def told(root: Path) -> list[list[str]]:
    path = root / "hook.log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def runs(service: Service, result: str) -> float | None:
    return service.metric("retraind_publish_hook_runs_total", result=result)


def test_the_hook_is_told_of_each_version(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(publish={"hook": hook(tmp_path)}).start()
    for name in ("a.csv", "b.csv"):
        service.drop(name)
        service.wait_for_state(name, "published")
    eventually(lambda: runs(service, "ok") == 2)
    versions = sorted((service.models / "telemetry_autoencoder" / "versions").iterdir())
    manifests = [json.loads((path / "manifest.json").read_text()) for path in versions]
    expected = [
        [one["version"], one["weights_sha256"], str(path)] for one, path in zip(manifests, versions, strict=True)
    ]
    assert told(tmp_path) == expected, "in order, once each, and nothing of systemd's"
    eventually(lambda: json.loads((service.state / "hook.json").read_text()) == [])
    assert service.stop() == 0


def test_a_hook_that_fails_or_hangs_is_a_warning_and_holds_nothing_up(
    make_service: MakeService, tmp_path: Path
) -> None:
    service = make_service(publish={"hook": hook(tmp_path, "exit 3")}).start()
    service.drop("a.csv")
    eventually(lambda: runs(service, "failed") == 1)
    assert "publish.hook for 000001-" in service.log()
    assert "exit status 3" in service.log()
    service.settings["publish"] = {"hook": hook(tmp_path, "sleep 1000 & wait"), "hook_timeout_seconds": 1.0}
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in service.log())
    service.drop("b.csv")
    service.drop("c.csv")
    service.wait_for_state("b.csv", "published")
    service.wait_for_state("c.csv", "published")
    eventually(lambda: runs(service, "timeout") == 2)
    assert len(told(tmp_path)) == 3
    service.settings["publish"] = {"hook": ["/nowhere/hook"]}
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: service.log().count("configuration reloaded") == 2)
    service.drop("d.csv")
    eventually(lambda: runs(service, "failed") == 2)
    assert "/nowhere/hook: No such file or directory" in service.log()


def test_a_hook_that_was_cut_off_by_a_crash_runs_again(make_service: MakeService, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)  # whoever reads it waits until the test writes: the first run is cut off there
    service = make_service(publish={"hook": hook(tmp_path, f"read line < {shlex.quote(str(gate))}")}).start()
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")
    eventually(lambda: len(told(tmp_path)) == 1)
    service.kill()
    service.start()
    eventually(lambda: len(told(tmp_path)) == 2)
    assert told(tmp_path)[0] == told(tmp_path)[1]
    with gate.open("w") as writer:  # both wait there: the first run outlived its service, as without systemd
        writer.write("go\ngo\n")
    eventually(lambda: runs(service, "ok") == 1)
    assert service.stop() == 0


def test_a_stop_ends_a_running_hook_and_the_next_start_runs_it_again(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(publish={"hook": hook(tmp_path, "sleep 1000 & wait")}).start()
    service.drop("a.csv")
    eventually(lambda: len(told(tmp_path)) == 1)
    assert service.stop() == 0
    service.settings["publish"] = {"hook": hook(tmp_path)}
    service.write_config()
    service.start()
    eventually(lambda: runs(service, "ok") == 1)


def test_nothing_is_published_until_it_is_signed(make_service: MakeService, tmp_path: Path) -> None:
    signer = tmp_path / "signer"
    signer.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E -c "print(\'signed\')"\n')
    signer.chmod(0o644)
    service = make_service(publish={"sign": [str(signer)]}).start()
    service.drop("a.csv")
    eventually(lambda: service.metric("retraind_fault", fault="models") == 1)
    assert "sign_failed" in json.dumps(service.status()) or "publish.sign" in json.dumps(service.status())
    assert service.live() is None
    signer.chmod(0o755)
    service.wait_for_state("a.csv", "published")
    current = service.models / "telemetry_autoencoder" / "current"
    assert (current / "manifest.json.sig").read_text() == "signed\n"
    assert len(service.trained()) == 1


def test_a_rollback_beside_the_service_is_noticed_and_stays(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(publish={"hook": hook(tmp_path)}).start()
    for name in ("a.csv", "b.csv"):
        service.drop(name)
        service.wait_for_state(name, "published")
    eventually(lambda: len(told(tmp_path)) == 2)
    one, two = (words[0] for words in told(tmp_path))
    done = service.command("models", "rollback")
    assert (done.returncode, done.stdout) == (0, f"{one} is live, before {two}\n")
    eventually(lambda: service.metric("retraind_rollbacks_total") == 1)
    assert service.metric("retraind_model_info", version=one) == 1
    assert "rolled back by another process" in service.log()
    eventually(lambda: len(told(tmp_path)) == 3)
    assert told(tmp_path)[2][0] == one
    service.kill()
    service.start()
    assert open_live(service.models).version == one, "also after a crash"
    service.drop("c.csv")
    service.wait_for_state("c.csv", "published")
    assert service.live()["sequence"] == 3


def test_versions_beyond_the_limit_go_and_the_pinned_stay(make_service: MakeService) -> None:
    service = make_service(models={"keep": 2}).start()
    for number in range(5):
        service.drop(f"{number}.csv")
        service.wait_for_state(f"{number}.csv", "published")
        if number == 0:
            assert "is pinned" in service.command("models", "pin", "1").stdout
    versions = service.models / "telemetry_autoencoder" / "versions"
    eventually(lambda: [int(path.name[:6]) for path in sorted(versions.iterdir())] == [1, 4, 5])
    assert "removed beyond models.keep: 000002-" in service.log()
    assert "pinned" in service.command("models").stdout
    assert service.command("models", "unpin", "1").returncode == 0


def test_the_verbs_on_models_say_what_is_there_and_what_is_damaged(make_service: MakeService) -> None:
    service = make_service().start()
    assert service.command("models", "verify").returncode == 64
    assert service.command("models", "rollback").returncode == 64
    for name in ("a.csv", "b.csv"):
        service.drop(name)
        service.wait_for_state(name, "published")
    one, two = sorted(path.name for path in (service.models / "telemetry_autoencoder" / "versions").iterdir())
    assert json.loads(service.command("models", "show", one, "--json").stdout)["version"] == one
    shown = service.command("models", "show", "2").stdout
    assert f"{two} (live)" in shown
    assert "b.csv" in shown
    assert service.command("models", "verify").returncode == 0
    everything = service.command("models", "verify", "--all", "--json")
    assert [version["ok"] for version in json.loads(everything.stdout)["versions"]] == [True, True]
    weights = service.models / "telemetry_autoencoder" / "versions" / one / "weights.pt"
    weights.chmod(0o644)
    weights.write_bytes(b"A.csv")
    done = service.command("models", "verify", "--all")
    assert done.returncode == 65
    assert "weights.pt has sha256" in done.stdout
    assert service.command("models", "verify", two).returncode == 0
    assert service.command("models", "rollback", one).returncode == 64
    for wrong in (["show"], ["pin"], ["list", one], ["show", "9"], ["show", one, "--all"], ["verify", one, "--all"]):
        assert service.command("models", *wrong).returncode == 64, wrong
    (service.models / "telemetry_autoencoder.pt").unlink()
    done = service.command("models", "verify", two)
    assert done.returncode == 65
    assert "does not lead to" in done.stdout


def test_with_a_manual_policy_a_model_waits_until_it_is_promoted_also_through_a_crash(
    make_service: MakeService, tmp_path: Path
) -> None:
    service = make_service(publish={"hook": hook(tmp_path)}, gate={"policy": "manual"}).start()
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")
    assert service.live() is None
    assert "it waits for `retraind models promote 1`" in service.log()
    listed = json.loads(service.command("models", "list", "--json").stdout)
    (one,) = listed["waiting"]
    assert listed["live"] is None
    assert "waits" in service.command("models").stdout
    service.kill()
    service.start()
    assert service.live() is None
    done = service.command("models", "promote", "1")
    assert (done.returncode, done.stdout) == (0, f"{one} is live, before none\n")
    eventually(lambda: [words[0] for words in told(tmp_path)] == [one])
    eventually(lambda: service.metric("retraind_model_info", version=one) == 1)
    assert open_live(service.models).version == one
    assert service.command("models", "promote").returncode == 64
    assert service.metric("retraind_rollbacks_total") == 0
