"""The installed unit under a real systemd: start, status, reload, stop, crashes, faults of disks, and what heals."""

import re
from collections.abc import Callable, Iterator

import pytest
import yaml
from installed import ENDLESS, INCOMING, PRODUCER, Service, rows

QUICK = {"intake": {"quiet_seconds": 0.2, "rescan_seconds": 1}}


@pytest.fixture(scope="module")
def machine_service(install: Callable[[str], Service]) -> Service:
    return install("lifecycle")


@pytest.fixture
def service(machine_service: Service) -> Iterator[Service]:
    """It runs with quick settings and has nothing to do, before and after."""
    one = machine_service
    one.configure({**QUICK})
    one.restart()
    one.says("^idle")
    yield one
    one.shell(f"systemctl stop retraind; rm -rf {INCOMING}/* /var/spool/retraind/active/* /var/lib/retraind/jobs/*")


def endless_job(service: Service, name: str = "endless.csv") -> None:
    """A job that trains until it is stopped or its settings change."""
    service.reload({**QUICK}, training=ENDLESS)
    service.drop(name, rows())
    service.says(f"^training {name}: epoch")


def may_end(service: Service) -> None:
    """From its next attempt on, an endless job is a short one."""
    service.reload({**QUICK}, training={"epochs": 2})


def test_it_starts_to_ready_and_says_what_it_does_in_each_state(service: Service) -> None:
    assert service.show("ActiveState") == "active"
    service.reload({}, intake={"quiet_seconds": 3600})
    service.drop("slow.csv", rows())
    assert service.says("^waiting for slow.csv to be complete")
    service.reload({**QUICK}, training=ENDLESS)
    assert service.says(r"^training slow.csv: epoch \d+/100000, loss [\d.]+, .* left$")
    shown = service.shell("systemctl status --no-pager retraind")
    assert re.search(r'Status: "training slow.csv: epoch', shown)
    service.reload({**QUICK, "device": "cuda"})
    service.shell(f"kill -KILL {service.worker_pid()}")
    assert service.says("^deferred: .*device is cuda.*; next try in")
    service.reload({**QUICK}, training={"epochs": 2})
    service.ends("slow.csv")
    assert re.match(r"idle: \d{6}-[0-9a-f]{12} is live", service.says("^idle"))
    service.shell("chown root /var/models")
    service.says("^degraded: .*/var/models")
    service.shell("chown retraind /var/models")
    service.says("^idle")


def test_a_stop_in_the_middle_of_a_job_is_quick_and_the_next_start_goes_on(service: Service) -> None:
    endless_job(service)
    before = service.cursor()
    service.shell("systemctl stop retraind")
    assert (service.show("Result"), service.show("ActiveState")) == ("success", "inactive")
    assert "stopping" in service.journal(before)
    assert service.machine.run("pgrep --full /retraind/worker").returncode == 1
    service.configure({**QUICK}, training={"epochs": 2})
    service.shell("systemctl start retraind")
    stopped = service.ends("endless.csv")
    assert stopped["attempts"] == 1
    service.reload({**QUICK, "intake": {**QUICK["intake"], "duplicates": "train"}}, training={"epochs": 2})
    service.drop("at-once.csv", rows())
    at_once = service.ends("at-once.csv")
    # The tail of a version's name is the hash of its weights.
    assert at_once["version"] != stopped["version"]
    assert at_once["version"].partition("-")[2] == stopped["version"].partition("-")[2]


def test_a_worker_that_is_killed_costs_one_attempt_and_not_the_service(service: Service) -> None:
    endless_job(service)
    pid = service.main_pid
    may_end(service)
    service.shell(f"kill -KILL {service.worker_pid()}")
    assert service.ends("endless.csv")["attempts"] == 2
    assert (service.main_pid, service.show("NRestarts")) == (pid, "0")
    assert service.scrape()['retraind_worker_exits_total{reason="killed"}'] == 1


def test_a_service_that_is_killed_is_restarted_and_nothing_is_lost_or_left_behind(service: Service) -> None:
    endless_job(service)
    may_end(service)
    worker, pid = service.worker_pid(), service.main_pid
    service.shell(f"kill -KILL {pid}")
    service.machine.wait(lambda: service.main_pid not in (0, pid), "systemd starts it again")
    assert service.machine.run(f"test -e /proc/{worker}/exe").returncode != 0
    assert service.ends("endless.csv")["attempts"] == 1
    assert service.show("NRestarts") == "1"


def test_a_loop_that_hangs_is_restarted_by_the_watchdog(service: Service) -> None:
    service.drop_in("quick-watchdog", "[Service]\nWatchdogSec=9\nTimeoutAbortSec=5\n")
    try:
        service.restart()
        endless_job(service)
        may_end(service)
        pid, before = service.main_pid, service.cursor()
        service.shell(f"kill -STOP {pid}")
        service.machine.wait(lambda: service.main_pid not in (0, pid), "the watchdog strikes")
        said = service.shell(f"journalctl --no-pager --output=cat --after-cursor='{before}'")
        assert "Watchdog timeout" in said
        assert service.ends("endless.csv")["attempts"] == 1
        assert service.show("NRestarts") == "1"
    finally:
        service.drop_in("quick-watchdog", "")


def test_a_reload_returns_when_the_new_configuration_is_in_force(service: Service) -> None:
    service.reload({**QUICK, "device": "cuda"}, log={"level": "debug"})
    service.drop("gpu.csv", rows())
    service.says("^deferred: .*device is cuda")
    service.reload({**QUICK}, training={"epochs": 2})
    service.ends("gpu.csv")


def test_a_running_job_keeps_its_settings_over_a_reload(service: Service) -> None:
    endless_job(service)
    worker = service.worker_pid()
    may_end(service)
    service.says("^training endless.csv: epoch .*/100000")
    assert service.worker_pid() == worker


def test_a_broken_configuration_is_refused_at_a_reload_and_the_old_one_stays(service: Service) -> None:
    pid = service.main_pid
    service.machine.write("/etc/retraind/retraind.yaml", "training:\n  epochs: many\n  epoch: 3\n")
    service.shell("systemctl reload retraind")
    assert service.says("^degraded: the configuration file has errors, the one in force stays")
    assert service.scrape()["retraind_config_last_reload_successful"] == 0
    assert "/etc/retraind/retraind.yaml:2: training.epochs: " in service.journal()
    assert (service.main_pid, service.show("ActiveState")) == (pid, "active")
    service.reload({**QUICK})
    service.says("^idle")


def test_two_reloads_at_once_both_end_well(service: Service) -> None:
    pid = service.main_pid
    service.shell("systemctl reload retraind & sleep 0.05; systemctl reload retraind; wait $!")
    service.shell(f"for i in 1 2 3 4 5; do kill -HUP {pid}; done")
    service.shell("systemctl reload retraind")
    assert (service.main_pid, service.show("ActiveState")) == (pid, "active")


def test_daemon_reload_does_not_touch_a_running_job(service: Service) -> None:
    endless_job(service)
    worker, pid = service.worker_pid(), service.main_pid
    service.shell("systemctl daemon-reload; systemctl daemon-reload")
    before = service.show("StatusText")
    service.machine.wait(lambda: service.show("StatusText") != before, "training goes on")
    assert (service.worker_pid(), service.main_pid) == (worker, pid)


def test_a_start_with_a_broken_configuration_fails_once_and_tells_once(service: Service) -> None:
    service.machine.write("/etc/retraind/failure.d/tell", '#!/bin/sh\necho "$MONITOR_UNIT" >> /var/tmp/told\n', 0o755)
    service.shell("systemctl stop retraind; rm -f /var/tmp/told")
    service.machine.write("/etc/retraind/retraind.yaml", "trainning: {}\n")
    before = service.cursor()
    assert service.machine.run("systemctl start retraind").returncode != 0
    service.machine.wait(lambda: service.show("ActiveState") == "failed", "it has failed")
    assert (service.show("NRestarts"), service.show("ExecMainStatus")) == ("0", "78")
    service.machine.wait(lambda: service.machine.run("test -e /var/tmp/told").returncode == 0, "the program ran")
    service.machine.wait(
        lambda: service.show("ActiveState", "retraind-failure.service") == "inactive", "the telling is over"
    )
    assert service.shell("cat /var/tmp/told").split() == ["retraind.service"]
    said = service.shell(
        f"journalctl --no-pager --output=cat --after-cursor='{before}' --unit=retraind-failure.service"
    )
    assert "retraind.service has failed (exit-code, exited 78): the configuration has errors" in said
    assert "did you mean training" in service.journal(before)
    service.shell("rm -r /etc/retraind/failure.d")


def test_a_crash_loop_ends_and_tells_at_its_end_only(service: Service) -> None:
    service.machine.write("/etc/retraind/failure.d/tell", "#!/bin/sh\necho told >> /var/tmp/told\n", 0o755)
    service.shell("rm -f /var/tmp/told")
    crash = "[Unit]\nStartLimitBurst=3\n[Service]\nExecStart=\nExecStart=/bin/sh -c 'exit 3'\nRestartMaxDelaySec=1\n"
    service.drop_in("crash", crash)
    try:
        service.machine.run("systemctl restart retraind")
        service.machine.wait(lambda: service.show("ActiveState") == "failed", "systemd gives up")
        service.machine.wait(lambda: service.machine.run("test -e /var/tmp/told").returncode == 0, "it is told")
        assert int(service.show("NRestarts")) >= 2
        assert service.shell("cat /var/tmp/told").split() == ["told"]
    finally:
        service.drop_in("crash", "")
        service.shell("rm -r /etc/retraind/failure.d; systemctl reset-failed retraind")


def test_a_full_models_directory_keeps_the_weights_and_publishes_once_there_is_room(service: Service) -> None:
    live = service.live()
    service.shell("systemctl stop retraind; mount -t tmpfs -o size=256k,uid=retraind,gid=retraind tmpfs /var/models")
    service.configure({**QUICK}, limits={"min_free_bytes": 0})
    try:
        service.shell("systemctl start retraind")
        service.says("^idle")
        service.shell("dd if=/dev/zero of=/var/models/filler bs=4k 2>/dev/null || true")
        service.drop("full.csv", rows())
        assert service.says("^degraded: .*(No space|full)")
        workers = service.journal().count("job")
        assert workers
        service.shell("rm /var/models/filler")
        job = service.ends("full.csv")
        assert job["attempts"] == 1, "what is trained is not trained again"
    finally:
        service.shell("systemctl stop retraind; umount /var/models")
    assert service.live() == live


def test_a_read_only_models_directory_is_waited_out_before_anything_is_trained(service: Service) -> None:
    service.shell("systemctl stop retraind; mount -t tmpfs -o uid=retraind,gid=retraind tmpfs /var/models")
    try:
        service.shell("systemctl start retraind")
        service.says("^idle")
        service.shell("mount -o remount,ro /var/models")
        assert service.says("^degraded: .*/var/models")
        service.drop("later.csv", rows())
        assert service.machine.run("curl --fail --silent http://127.0.0.1:10935/-/ready").returncode != 0
        service.shell("mount -o remount,rw /var/models")
        assert service.ends("later.csv")["attempts"] == 1
    finally:
        service.shell("systemctl stop retraind; umount /var/models")


def test_a_machine_without_a_gpu_starts_trains_and_says_cpu(service: Service) -> None:
    assert service.machine.run("ls /dev/nvidia*").returncode != 0
    assert service.show("ConditionResult", "retraind-gpu.service") == "no"
    endless_job(service)
    series = service.scrape()
    assert (series['retraind_job_device{device="cpu"}'], series['retraind_job_device{device="cuda"}']) == (1, 0)


def test_loader_processes_without_room_in_shared_memory_do_not_end_in_a_crash_loop(service: Service) -> None:
    service.shell("systemctl stop retraind; mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm")
    try:
        service.configure({**QUICK}, training={"num_workers": 2})
        service.shell("systemctl start retraind")
        service.drop("shm.csv", rows(20_000, 32))
        job = service.ends("shm.csv")
        assert (job["attempts"], job["state"]) == (1, "published")
        assert "host.shm" in service.journal(), "it is said that there is little room"
    finally:
        service.shell("systemctl stop retraind; umount /dev/shm")


NO_USER = """[Service]
DynamicUser=yes
User=retraind-dynamic
Group=
SupplementaryGroups=retraind-drop
UnsetEnvironment=HOME
ReadWritePaths=/srv/dynamic
"""


def test_caches_need_no_home_and_no_passwd_entry(service: Service) -> None:
    service.shell(
        "systemctl stop retraind; mkdir -p /srv/dynamic/spool/{incoming,active,done,quarantine} /srv/dynamic/models"
        "; chmod -R 0777 /srv/dynamic; touch /srv/before"
    )
    service.drop_in("no-user", NO_USER)
    try:
        service.configure({**QUICK}, spool={"dir": "/srv/dynamic/spool"}, models={"dir": "/srv/dynamic/models"})
        service.shell("systemctl start retraind")
        service.says("^idle")
        (service.machine.root / "srv/dynamic.csv").write_text(rows())
        service.shell("cp /srv/dynamic.csv /srv/dynamic/spool/incoming/dynamic.csv")
        service.says("^idle: 000001-.* is live")
        allowed = ("/var/lib/private/retraind/", "/var/cache/private/retraind/", "/etc/", "/var/lib/systemd/", "/srv/")
        written = service.shell("find / -xdev -newer /srv/before -type f -not -path '/var/log/*'").splitlines()
        assert [path for path in written if not path.startswith(allowed)] == []
    finally:
        service.shell("systemctl stop retraind")
        service.drop_in("no-user", "")
        service.shell("rm -rf /srv/dynamic /var/lib/retraind /var/cache/retraind /var/lib/private/retraind")


@pytest.mark.parametrize("example", ["cpu-only", "memory-limit"])
def test_a_model_is_trained_under_the_drop_ins_that_are_shipped(service: Service, example: str) -> None:
    service.drop_in(example, service.shell(f"cat /usr/share/doc/retraind/examples/{example}.conf"))
    try:
        service.restart()
        service.drop(f"{example}.csv", rows(2000 + len(example)))
        service.ends(f"{example}.csv")
        assert service.scrape()["retraind_ready"] == 1
    finally:
        service.drop_in(example, "")


def test_a_spool_in_another_place_works_by_the_commands_of_the_operators_page(service: Service) -> None:
    example = service.shell("cat /usr/share/doc/retraind/examples/nfs-spool.conf")
    commands = re.search(r"with the drop-in nfs-spool.conf.*?\n\n((?:    [^\n]+\n)+)", service.operations(), re.DOTALL)
    service.drop_in("nfs-spool", example)
    try:
        service.configure({**QUICK}, spool={"dir": "/srv/telemetry/retraind"})
        service.shell(commands[1])
        service.restart()
        (service.machine.root / "srv/elsewhere.csv").write_text(rows(2500))
        service.shell(
            "cd /srv/telemetry/retraind/incoming; cp /srv/elsewhere.csv .e; mv .e elsewhere.csv", user=PRODUCER
        )
        service.ends("elsewhere.csv")
        service.shell("test -e /srv/telemetry/retraind/done/elsewhere.csv")
    finally:
        service.drop_in("nfs-spool", "")
        service.shell("systemctl stop retraind; rm -r /srv/telemetry /etc/tmpfiles.d/retraind.conf")


def test_the_endpoint_has_tls_with_a_key_that_only_root_may_read(service: Service) -> None:
    service.drop_in("tls-credentials", service.shell("cat /usr/share/doc/retraind/examples/tls-credentials.conf"))
    command = re.search(r"```sh\n(openssl req .*?)chown", service.operations(), re.DOTALL)[1]
    hashed = "import bcrypt; print(bcrypt.hashpw(b'secret', bcrypt.gensalt(10)).decode())"
    try:
        service.shell(command)
        service.shell("chmod 0600 /etc/retraind/web.key")
        users = {"prometheus": service.shell(f'python3 -c "{hashed}"').strip()}
        web = {"tls_server_config": {"cert_file": "web.crt", "key_file": "web.key"}, "basic_auth_users": users}
        service.machine.write("/etc/retraind/web.yaml", yaml.safe_dump(web), 0o600)
        service.configure({**QUICK}, metrics={"web_config": "/run/credentials/retraind.service/web.yaml"})
        service.restart()
        curl = "curl --silent --cacert /etc/retraind/web.crt --resolve node1.example:10935:127.0.0.1"
        url = "https://node1.example:10935/metrics"
        assert "retraind_ready 1" in service.shell(f"{curl} --fail --user prometheus:secret {url}")
        assert service.shell(f"{curl} --output /dev/null --write-out '%{{http_code}}' {url}") == "401"
        assert service.machine.run("curl --silent --fail http://127.0.0.1:10935/metrics").returncode != 0
    finally:
        service.drop_in("tls-credentials", "")
        service.shell("rm -f /etc/retraind/web.*")


def test_the_worker_runs_under_an_interpreter_of_its_own(service: Service) -> None:
    # Without a network: what the second command of the operators page installs is taken from the system here.
    command = re.search(r"^    (python3 -m venv /opt/retraind/torch)$", service.operations(), re.MULTILINE)[1]
    service.shell(f"{command} --system-site-packages --without-pip")
    service.reload({**QUICK}, worker={"python": "/opt/retraind/torch/bin/python"}, training=ENDLESS)
    checked = service.shell("runuser --user=retraind -- retraind check")
    assert re.search(
        r"worker.python +pass +/opt/retraind/torch/bin/python: Python 3.13.*, torch 2.6.*, no CUDA", checked
    )
    service.drop("venv.csv", rows())
    service.says("^training venv.csv: epoch")
    assert "/opt/retraind/torch/bin/python" in service.shell(f"tr '\\0' ' ' < /proc/{service.worker_pid()}/cmdline")


def test_an_interpreter_without_torch_makes_jobs_wait_and_says_so(service: Service) -> None:
    service.shell("python3 -m venv --without-pip /opt/bare")
    service.reload({**QUICK}, worker={"python": "/opt/bare/bin/python"})
    service.drop("bare.csv", rows())
    service.says("^deferred: .*/opt/bare/bin/python")
    assert service.machine.run("runuser --user=retraind -- retraind preflight").returncode == 2
    service.reload({**QUICK}, training={"epochs": 2})
    assert service.ends("bare.csv")["attempts"] == 1
