"""The files in etc/prometheus/: they load, alerts fire when they should, and each leads to its runbook."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "etc" / "prometheus"
RULE_FILES = ("retraind.recording.yaml", "retraind.rules.yaml")
CASES = sorted((ROOT / "tests" / "prometheus").glob("*.test.yaml"))
GOLDEN = (ROOT / "tests" / "golden" / "metrics.txt").read_text()
OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text()
RUNBOOKS = "file:///usr/share/doc/retraind/OPERATIONS.md"
# Not of this service alone: one that Prometheus makes itself, one of every process with a Prometheus library.
FOREIGN_METRICS = {"up", "process_start_time_seconds"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@cache
def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Every rule of the kind `alert` or `record`, by its name."""
    groups = [group for name in RULE_FILES for group in read(RULES / name)["groups"]]
    found = [rule for group in groups for rule in group["rules"] if kind in rule]
    named = {rule[kind]: rule for rule in found}
    assert len(named) == len(found), "a name stands twice"
    return named


def exported() -> set[str]:
    """The names of all series that the service has."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", GOLDEN, re.MULTILINE):
        names |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"} if kind == "histogram" else {name}
    return names


def metrics_of(expression: str) -> set[str]:
    """The names of the series that an expression asks for."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|without|ignoring) \([^)]*\)", "", bare)
    words = re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", bare)
    functions = set(re.findall(r"([a-zA-Z_]\w*)\s*\(", bare))
    return set(words) - functions - {"and", "or", "unless", "bool", "by", "on"}


def promtool(*arguments: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus (from Debian 13 on also promtool) has it")
    done = subprocess.run(
        [tool, *arguments],
        cwd=RULES,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"promtool {' '.join(arguments)}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('up{job="retraind"} == 0 or absent(up{job="retraind"})', {"up"}),
        ('sum by (job) (increase(a_total{b=~"c|d"}[1d])) > 0 and on (job, instance) e{f="g"} < 5', {"a_total", "e"}),
        ("instance:a_per_b:ratio_rate1d > 0.5", {"instance:a_per_b:ratio_rate1d"}),
        ("time() - a_seconds > 7 * 86400 unless on (job) b", {"a_seconds", "b"}),
    ],
)
def test_the_names_in_an_expression_are_found(expression: str, names: set[str]) -> None:
    assert metrics_of(expression) == names


def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", *RULE_FILES)


def test_the_scrape_configuration_is_well_formed_and_loads_the_rules() -> None:
    promtool("check", "config", "scrape.yaml")
    assert read(RULES / "scrape.yaml")["rule_files"] == list(RULE_FILES)


def test_the_form_with_tls_and_a_password_is_well_formed_too(tmp_path: Path) -> None:
    text = (RULES / "scrape.yaml").read_text()
    commented = re.search(r"^  # - job_name: retraind\n(?:  #   .*\n)+", text, re.MULTILINE)[0]
    secured = "scrape_configs:\n" + commented.replace("  # ", "  ").replace("/etc/prometheus/", f"{tmp_path}/")
    (tmp_path / "ca.pem").touch()
    (tmp_path / "retraind.password").touch()
    (tmp_path / "secured.yaml").write_text(secured)
    promtool("check", "config", str(tmp_path / "secured.yaml"))


def test_the_target_is_where_the_service_listens_by_default() -> None:
    (scrape,) = read(RULES / "scrape.yaml")["scrape_configs"]
    assert scrape["job_name"] == "retraind"
    assert scrape["static_configs"] == [{"targets": [read(ROOT / "etc" / "retraind.yaml")["metrics"]["listen"]]}]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.partition(".")[0])
def test_alerts_fire_when_they_should_and_not_before(path: Path) -> None:
    promtool("test", "rules", str(path))


@pytest.mark.parametrize("name", rules("alert"))
def test_every_alert_has_a_case_that_fires_it_and_one_that_comes_close(name: str) -> None:
    cases = [case for path in CASES for test in read(path)["tests"] for case in test.get("alert_rule_test", ())]
    expected = [case["exp_alerts"] for case in cases if case["alertname"] == name]
    assert any(expected), "no case fires it"
    assert not all(expected), "no case comes close and does not fire it"


@pytest.mark.parametrize("name", rules("alert"))
def test_every_alert_says_how_bad_what_and_what_to_do(name: str) -> None:
    alert = rules("alert")[name]
    assert name.startswith("Retraind")
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "{{ $labels.instance }}" in alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".")
    assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"


def test_the_runbooks_are_those_of_the_alerts_in_their_order() -> None:
    section = re.search(r"^## Alerts\n(.*?)(?=^## |\Z)", OPERATIONS, re.MULTILINE | re.DOTALL)[1]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == list(rules("alert"))


@pytest.mark.parametrize("name", [*rules("alert"), *rules("record")])
def test_every_rule_asks_for_series_that_exist(name: str) -> None:
    rule = {**rules("alert"), **rules("record")}[name]
    asked = metrics_of(rule["expr"])
    assert asked
    assert asked <= exported() | FOREIGN_METRICS | rules("record").keys()


@pytest.mark.parametrize("name", rules("record"))
def test_every_recorded_series_is_named_by_level_metric_and_operations_and_is_used(name: str) -> None:
    level, metric, operations = name.split(":")
    assert level.startswith("instance")
    assert metric.startswith("retraind_")
    assert operations.startswith("ratio")
    assert any(name in metrics_of(alert["expr"]) for alert in rules("alert").values())


@pytest.mark.parametrize("name", [*rules("alert"), *rules("record")])
def test_no_rule_adds_instances_up(name: str) -> None:
    expression = {**rules("alert"), **rules("record")}[name]["expr"]
    for aggregation in re.findall(r"\b(?:sum|max|min|avg|count)\b(?: by \(([^)]*)\))?", expression):
        assert {"job", "instance"} <= set(aggregation.split(", "))


@pytest.mark.parametrize("name", rules("alert"))
def test_no_job_of_the_scrape_configuration_is_named_but_where_nothing_else_tells(name: str) -> None:
    assert ('job="' in rules("alert")[name]["expr"]) == (name == "RetraindDown")


@pytest.mark.parametrize("path", [*RULES.iterdir(), *CASES], ids=lambda path: path.name)
def test_the_files_are_plain_ascii(path: Path) -> None:
    assert path.read_text().isascii()
