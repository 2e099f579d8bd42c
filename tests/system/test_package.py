"""The package, from its sources to its purge, by the commands of README.md and by apt and dpkg."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from installed import ENDLESS, INCOMING, Service, block_of_readme, rows
from machine import Machine


@pytest.fixture(scope="module")
def fresh(readme_machine: Machine) -> Service:
    service = Service(readme_machine)
    service.add_producer()
    return service


def test_the_package_is_clean_by_debians_own_judge(readme_machine: Machine) -> None:
    done = readme_machine.run("cd /src && lintian --fail-on=error,warning --tag-display-limit=0 retraind_*.changes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"^[EW]:", done.stdout, re.MULTILINE), done.stdout


def test_after_the_installation_the_service_runs_and_will_run_at_boot(fresh: Service) -> None:
    fresh.machine.wait(lambda: fresh.show("ActiveState") == "active", "it runs")
    assert fresh.shell("systemctl is-enabled retraind").strip() == "enabled"
    assert fresh.show("NRestarts") == "0"
    assert fresh.says("idle").startswith("idle: no model published yet")


def test_users_and_directories_have_their_owners_and_modes(fresh: Service) -> None:
    listed = fresh.shell(
        "stat --format='%n %a %U:%G' /var/spool/retraind /var/spool/retraind/* /var/models /var/lib/retraind"
        " /var/cache/retraind /etc/retraind/retraind.yaml"
    )
    assert listed.splitlines() == [
        "/var/spool/retraind 755 retraind:retraind",
        "/var/spool/retraind/active 2750 retraind:retraind",
        "/var/spool/retraind/done 2750 retraind:retraind",
        "/var/spool/retraind/incoming 3730 retraind:retraind-drop",
        "/var/spool/retraind/quarantine 2750 retraind:retraind",
        "/var/models 755 retraind:retraind",
        "/var/lib/retraind 750 retraind:retraind",
        "/var/cache/retraind 750 retraind:retraind",
        "/etc/retraind/retraind.yaml 644 root:root",
    ]
    assert "retraind-drop" in fresh.shell("id --name --groups retraind").split()
    assert fresh.shell("getent passwd retraind").strip().endswith("/nologin")


def test_systemd_finds_no_fault_with_the_units_and_a_tight_sandbox(fresh: Service) -> None:
    done = fresh.machine.run("systemd-analyze verify retraind.service retraind-failure.service retraind-gpu.service")
    assert (done.returncode, done.stderr) == (0, "")
    judged = fresh.machine.run("systemd-analyze security --threshold=15 --no-pager retraind.service")
    assert judged.returncode == 0, judged.stdout


def test_a_file_of_a_member_of_the_group_becomes_a_model_that_a_consumer_loads(fresh: Service) -> None:
    fresh.drop("node-1.csv", rows())
    job = fresh.ends("node-1.csv")
    assert fresh.live() == job["version"]
    block = block_of_readme("tested", "python")
    fresh.machine.write("/srv/consumer.py", block + "\nprint(sorted(state)[0], len(centre))\n")
    assert fresh.shell("python3 /srv/consumer.py", user="nobody").split() == ["decoder.0.bias", "8"]


def test_a_member_of_the_group_sees_and_touches_nothing_but_its_own(fresh: Service) -> None:
    fresh.shell("id bob 2>/dev/null || useradd --create-home --groups retraind-drop bob")
    fresh.shell(f"cp /srv/node-1.csv {INCOMING}/.other.csv", user="alice")
    for script in (f"ls {INCOMING}", f"rm {INCOMING}/.other.csv", f"mv {INCOMING}/.other.csv /tmp/x"):
        assert fresh.machine.run(script, user="bob").returncode != 0, script
    assert fresh.machine.run(f"touch {INCOMING}/.x", user="nobody").returncode != 0
    fresh.shell(f"rm {INCOMING}/.other.csv")


PROMETHEUS = """systemd-run --quiet --unit=test-prometheus --property=DynamicUser=yes \
    --property=StateDirectory=test-prometheus prometheus --config.file=/usr/share/retraind/prometheus/scrape.yaml \
    --storage.tsdb.path=/var/lib/test-prometheus --web.listen-address=127.0.0.1:9090"""


def test_debians_prometheus_scrapes_it_with_the_rules_that_are_shipped(fresh: Service) -> None:
    fresh.shell(PROMETHEUS)
    try:

        def scraped() -> str:
            query = "curl --silent 'http://127.0.0.1:9090/api/v1/query?query=up'"
            return re.findall(r'"job":"retraind"},"value":\[[\d.]+,"(\d)"\]', fresh.machine.run(query).stdout)

        fresh.machine.wait(lambda: scraped() == ["1"], "up is 1")
        rules = fresh.shell("curl --silent http://127.0.0.1:9090/api/v1/rules")
        assert set(re.findall(r'"health":"(\w+)"', rules)) <= {"ok", "unknown"}
        assert '"name":"RetraindDown"' in rules
    finally:
        fresh.shell("systemctl stop test-prometheus")


def test_debians_promtool_finds_no_fault_with_metrics_and_rules(fresh: Service) -> None:
    fresh.shell("curl --silent http://127.0.0.1:10935/metrics | promtool check metrics")
    fresh.shell("promtool check config /usr/share/retraind/prometheus/scrape.yaml")
    fresh.shell("cd /src/retraind/tests/prometheus && promtool test rules *.test.yaml")


def test_the_pages_of_the_manual_and_the_completion_are_there(fresh: Service) -> None:
    for page in ("retraind.8", "retraind.yaml.5"):
        text = fresh.shell(f"man --pager=cat {page.rpartition('.')[2]} {page.rpartition('.')[0]} 2>/dev/null")
        assert "retraind" in text
    listed = fresh.shell("dpkg --listfiles retraind")
    for path in (
        "/usr/share/bash-completion/completions/retraind", "/usr/share/retraind/prometheus/retraind.rules.yaml",
        "/usr/share/retraind/grafana/retraind.json", "/usr/share/doc/retraind/OPERATIONS.md",
        "/usr/share/doc/retraind/examples/cpu-only.conf",
    ):  # fmt: skip
        assert path in listed.splitlines()


def test_check_and_preflight_pass_on_the_machine_as_it_was_installed(fresh: Service) -> None:
    as_service = "runuser --user=retraind -- retraind"
    assert "torch 2.6" in fresh.shell(f"{as_service} check")
    assert fresh.machine.run(f"{as_service} preflight").returncode == 0


def test_debians_own_test_of_the_package_passes(fresh: Service) -> None:
    done = fresh.machine.run(
        "cd /src/retraind && autopkgtest --ignore-restrictions=isolation-container --no-built-binaries . -- null",
        seconds=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^smoke\s+PASS", done.stdout + done.stderr, re.MULTILINE)


@pytest.fixture(scope="module")
def newer(readme_machine: Machine, package: Path) -> Path:
    """The same package, one version on."""
    readme_machine.shell(
        r"cd /src/retraind; sed --in-place '1s/(\(.*\))/(\1+next)/' debian/changelog"
        " && dpkg-buildpackage --build=binary --no-sign && mv ../retraind_*next_all.deb /root"
    )
    (found,) = (readme_machine.root / "root").glob("retraind_*next_all.deb")
    return found


@pytest.fixture(scope="module")
def upgraded(install: Callable[[str], Service], newer: Path) -> Service:
    service = install("upgraded")
    (service.machine.root / "root/newer.deb").write_bytes(newer.read_bytes())
    return service


def test_an_upgrade_with_a_job_running_loses_nothing_and_keeps_an_edited_configuration(upgraded: Service) -> None:
    upgraded.configure(training=ENDLESS, log={"level": "debug"})
    upgraded.restart()
    upgraded.drop("node-1.csv", rows())
    upgraded.says("^training node-1.csv: epoch")
    before, old_pid = upgraded.shell("sha256sum /etc/retraind/retraind.yaml"), upgraded.main_pid
    upgraded.shell("apt-get install --option=Dpkg::Options::=--force-confdef /root/newer.deb")
    upgraded.machine.wait(lambda: upgraded.main_pid not in (0, old_pid), "it runs again")
    assert upgraded.shell("sha256sum /etc/retraind/retraind.yaml") == before
    assert "+next" in upgraded.shell("dpkg-query --show retraind")
    upgraded.says("^training node-1.csv: epoch")
    # The settings of the next attempt are those in force then, so that this job may end now.
    upgraded.configure(training={"epochs": 2})
    upgraded.restart()
    job = upgraded.ends("node-1.csv")
    assert job["attempts"] == 1, "an upgrade is not the dataset's fault"


def test_a_disabled_service_stays_disabled_and_stopped_over_an_upgrade(upgraded: Service) -> None:
    upgraded.shell("systemctl disable --now retraind; apt-get install --reinstall /root/newer.deb")
    assert upgraded.machine.run("systemctl is-enabled retraind").stdout.strip() == "disabled"
    assert upgraded.show("ActiveState") == "inactive"
    upgraded.shell("systemctl enable --now retraind")


def test_remove_keeps_all_data_and_purge_keeps_models_and_datasets_and_says_so(upgraded: Service) -> None:
    live = upgraded.live()
    upgraded.shell("apt-get remove retraind")
    assert upgraded.machine.run("pgrep --full retraind").returncode == 1
    upgraded.shell("test -e /etc/retraind/retraind.yaml; test -d /var/lib/retraind/jobs")
    upgraded.shell(f"cp /srv/node-1.csv {INCOMING}/waiting.csv; chown alice:retraind-drop {INCOMING}/waiting.csv")
    said = upgraded.shell("apt-get purge retraind")
    for path in ("/var/models", "/var/spool/retraind"):
        assert re.search(rf"^retraind: kept {path}: ", said, re.MULTILINE), said
    left = upgraded.shell(
        "find / -xdev -name '*retraind*' -not -path '/proc/*' -not -path '/root/*' | sort"
    ).splitlines()
    assert left == ["/var/spool/retraind"]
    assert upgraded.live() == live
    upgraded.shell("test -e /var/spool/retraind/incoming/waiting.csv; test -e /var/spool/retraind/done/node-1.csv")


def test_installed_again_it_goes_on_with_what_was_kept(upgraded: Service) -> None:
    upgraded.shell("apt-get install /root/newer.deb")
    assert upgraded.ends("waiting.csv")["version"].startswith("000002-")


def test_what_is_kept_does_not_keep_empty_directories(install: Callable[[str], Service]) -> None:
    service = install("purged")
    said = service.shell("apt-get purge retraind")
    assert "kept" not in said
    assert service.machine.run("ls -d /var/models /var/spool/retraind /var/lib/retraind /etc/retraind").stdout == ""


def test_without_what_is_only_recommended_the_service_runs_and_says_what_is_missing(
    install: Callable[[str], Service],
) -> None:
    service = install("bare")
    # All that neither the package nor systemd depends on goes; nothing is fetched.
    service.shell(
        "apt-mark auto '.*' >/dev/null; apt-mark manual retraind systemd-sysv dbus procps curl >/dev/null;"
        " apt-get autoremove --purge --option=APT::AutoRemove::RecommendsImportant=false"
        " --option=APT::AutoRemove::SuggestsImportant=false",
        seconds=600,
    )
    assert service.machine.run("python3 -c 'import torch'").returncode != 0
    service.restart()
    assert service.says("idle").startswith("idle: no model published yet")
    service.drop("node-1.csv", rows())
    text = service.says("^deferred: ")
    assert re.search("numpy|pandas|torch", text), text
    assert service.scrape()['retraind_fault{fault="worker"}'] == 1

    def waits() -> bool:
        job = service.job("node-1.csv")
        return (job["state"], job["attempts"]) == ("deferred", 0)

    service.machine.wait(waits, "no attempt is used up")
    listed = service.machine.run("retraind check")
    assert listed.returncode == 69
    assert "python3-torch" in listed.stdout
