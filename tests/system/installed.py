"""The installed service on a machine, as its administrator, its producers and its consumers see it."""

import json
import re
from typing import Any

import yaml
from machine import ROOT, WAIT_SECONDS, Machine

PRODUCER = "alice"
INCOMING = "/var/spool/retraind/incoming"
# A job that goes on until it is told otherwise: 135 million steps of `rows()`, hours on the fastest machine there is.
ENDLESS = {"epochs": 100_000, "batch_size": 2}


def rows(number: int = 3000, num_metrics: int = 8) -> str:
    """A CSV file of smooth made-up metrics."""
    header = ",".join(["timestamp", *(f"m{k:02d}" for k in range(num_metrics))])
    lines = [
        ",".join([f"2026-11-30T{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}Z",
                  *(f"{(i * (k + 3)) % 97 / 7 + k * 10:.4f}" for k in range(num_metrics))])
        for i in range(number)
    ]  # fmt: skip
    return "\n".join([header, *lines]) + "\n"


def block_of_readme(marker: str, language: str) -> str:
    """The code block of README.md that follows a marker."""
    found = re.search(rf"<!-- {marker} -->\n```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, marker
    return found[1]


class Service:
    """retraind.service on a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.shell = machine.shell

    def show(self, name: str, unit: str = "retraind.service") -> str:
        """A property of the unit."""
        return self.shell(f"systemctl show --property={name} --value {unit}").strip()

    @property
    def main_pid(self) -> int:
        return int(self.show("MainPID"))

    def worker_pid(self) -> int:
        """The worker's process, 0 when there is none."""
        found = self.machine.run(f"pgrep --parent {self.main_pid}").stdout.split()
        return int(found[0]) if found else 0

    def says(self, pattern: str, seconds: float = WAIT_SECONDS) -> str:
        """Waits until STATUS, as `systemctl status` shows it, matches; the line."""
        last = ""

        def matches() -> bool:
            nonlocal last
            last = self.show("StatusText")
            return re.search(pattern, last) is not None

        try:
            self.machine.wait(matches, f"STATUS matches {pattern!r}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last!r}\n{self.journal()[-3000:]}") from None
        return last

    def configure(self, settings: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """Writes the configuration file; nobody is told."""
        self.machine.write("/etc/retraind/retraind.yaml", yaml.safe_dump({**(settings or {}), **sections}))

    def reload(self, settings: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        self.configure(settings, **sections)
        self.shell("systemctl reload retraind")

    def add_producer(self) -> None:
        self.shell(f"id {PRODUCER} 2>/dev/null || useradd --create-home --groups retraind-drop {PRODUCER}")

    def drop(self, name: str, text: str) -> None:
        """As a member of retraind-drop does: written under a hidden name, then renamed."""
        staged = self.machine.root / "srv" / name
        staged.write_text(text)
        self.shell(
            f"umask 027; cp /srv/{name} {INCOMING}/.{name}; mv {INCOMING}/.{name} {INCOMING}/{name}", user=PRODUCER
        )

    def jobs(self) -> list[dict[str, Any]]:
        """The newest first, as `retraind jobs --json` tells."""
        return json.loads(self.shell("retraind jobs --json"))

    def job(self, name: str) -> dict[str, Any]:
        """The newest job of a file; empty when there is none yet."""
        return next((job for job in self.jobs() if job["name"] == name), {})

    def ends(self, name: str, state: str = "published", seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Waits for the end of a file's job, which must be that one."""
        final = ("published", "duplicate", "rejected", "quarantined")

        def ended() -> dict[str, Any]:
            job = self.job(name)
            return job if job.get("state") in final else {}

        try:
            job = self.machine.wait(ended, f"the job of {name} ends", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.show('StatusText')}\n{self.journal()[-3000:]}") from None
        assert job["state"] == state, f"{job}\n{self.journal()[-3000:]}"
        return job

    def live(self) -> str:
        """The name of the live version, empty when there is none."""
        return self.machine.run("readlink /var/models/telemetry_autoencoder/current").stdout.strip().rpartition("/")[2]

    def scrape(self) -> dict[str, float]:
        """Every series of the endpoint."""
        text = self.shell("curl --fail --silent http://127.0.0.1:10935/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def journal(self, since: str = "") -> str:
        """Its log lines; since a cursor, all of them without one."""
        after = f"--after-cursor={since!r}" if since else ""
        return self.shell(f"journalctl --unit=retraind.service --output=cat --no-pager {after}")

    def cursor(self) -> str:
        """Where the journal ends now."""
        text = self.shell("journalctl --no-pager --lines=0 --show-cursor")
        return text.partition("cursor: ")[2].strip()

    def operations(self) -> str:
        """The operators' page as it was installed."""
        return self.shell("cat /usr/share/doc/retraind/OPERATIONS.md")

    def restart(self) -> None:
        self.shell("systemctl reset-failed retraind; systemctl restart retraind")

    def drop_in(self, name: str, text: str) -> None:
        """Installs a drop-in of the unit, or takes it away when it is empty; a restart is the caller's."""
        path = f"/etc/systemd/system/retraind.service.d/{name}.conf"
        if text:
            self.machine.write(path, text)
        else:
            self.shell(f"rm -f {path}")
        self.shell("systemctl daemon-reload")
