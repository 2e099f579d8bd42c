"""The dashboard: every query answered by a real Prometheus that scrapes a real service, and a layout without overlap.

Grafana itself is not asked: what it puts in the place of its variables is put there by `filled`.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from harness import Service, eventually

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "etc" / "grafana" / "retraind.json"
RULES = ROOT / "etc" / "prometheus"
DASHBOARD = json.loads(PATH.read_text())
MAX_BYTES = 350_000
COLUMNS = 24
# Those of Grafana 10 and later. graph, table-old, singlestat and the like are gone or on their way out.
KINDS = {"bargauge", "heatmap", "row", "stat", "state-timeline", "table", "timeseries"}
# What Grafana would choose for a Prometheus that scrapes once a second and a graph of the last minutes.
VARIABLES = {"job": "retraind", "instance": ".+", "__rate_interval": "10m", "__range": "10m"}
SCRAPE_SECONDS = 1
NUM_INSTANCES = 2


class Query(NamedTuple):
    """One question of the dashboard; `about` names it in a failure."""

    about: str
    expr: str
    legend: str


def panels() -> list[dict[str, Any]]:
    return DASHBOARD["panels"]


def queries() -> list[Query]:
    found = [
        Query(f"{panel['title']}, {target['refId']}", target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel.get("targets", ())
    ]
    annotations = (one for one in DASHBOARD["annotations"]["list"] if "expr" in one)
    return found + [Query(one["name"], one["expr"], one["titleFormat"]) for one in annotations]


def filled(expr: str) -> str:
    """The expression with Grafana's variables replaced; one that is not known here is a mistake."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expr)


class Prometheus:
    """A server of its own on a free port, with the shipped rules and a service to scrape."""

    def __init__(self, executable: str, root: Path, target: str) -> None:
        config = yaml.safe_load((RULES / "scrape.yaml").read_text())
        config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"}
        config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
        # The one service twice, as two instances: a line that does not tell them apart, or a match that needs there
        # to be one, shows.
        targets = [target, target.replace("127.0.0.1", "localhost")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        (root / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._log_path = root / "prometheus.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [executable, f"--config.file={root / 'prometheus.yaml'}", f"--storage.tsdb.path={root / 'tsdb'}",
                 "--web.listen-address=127.0.0.1:0"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self) -> None:
        """Until it answers. Port 0 takes a free one, which only the log tells."""
        self.url = f"http://{eventually(self._address, 'Prometheus says where it listens')}"
        eventually(self._is_ready, "Prometheus is ready")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10):
                return True
        except OSError:  # it listens before it answers: 503
            return False

    def _address(self) -> str:
        assert self._process.poll() is None, self._log_path.read_text()
        found = re.search(r'msg="Listening on" address=(127\.0\.0\.1:[1-9]\d*)', self._log_path.read_text())
        return found[1] if found else ""

    def ask(self, path: str, **parameters: str) -> Any:
        question = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(question, timeout=10) as response:
            return json.load(response)["data"]

    def vector(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now that have a finite value."""
        try:
            result = self.ask("query", query=expr)["result"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}\n{error.read().decode()}")
        return [series for series in result if math.isfinite(float(series["value"][1]))]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has seen a service through jobs of every kind, and sees it train one now."""
    executable = shutil.which("prometheus")
    if executable is None:
        pytest.skip("prometheus is not installed: Debian's package prometheus has it")
    with contextlib.ExitStack() as stack:
        service = Service(tmp_path_factory.mktemp("service"))
        stack.callback(service.close)
        service.start()
        target = service.url.removeprefix("http://")
        server = Prometheus(executable, tmp_path_factory.mktemp("prometheus"), target)
        stack.callback(server.close)
        server.wait()
        # The counters at 0 first: what was counted before the first scrape is no increase.
        eventually(lambda: len(server.vector("retraind_scans_total")) == NUM_INSTANCES, "a first scrape of each")
        live_through_jobs(service)
        yield server


def live_through_jobs(service: Service) -> None:
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    service.drop("again.csv", "good.csv")
    service.wait_for_state("again.csv", "duplicate")
    for name, state in (("refuse.csv", "quarantined"), ("gate.csv", "rejected"), ("memory.csv", "published")):
        service.drop(name)
        service.wait_for_state(name, state)
    service.drop("waiting.csv.part", mtime=1_700_000_000)  # a transfer that will not end
    service.drop("hold.csv")
    eventually(lambda: service.metric("retraind_job_loss"), "hold.csv trains")
    service.drop("next.csv")
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready"), "next.csv waits")


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.about)
def test_every_query_finds_data_that_its_legend_can_name(prometheus: Prometheus, query: Query) -> None:
    wanted = NUM_INSTANCES if "{{instance}}" in query.legend else 1
    found = eventually(
        lambda: series if len(series := prometheus.vector(filled(query.expr))) >= wanted else None,
        f"data for {query.about}: {filled(query.expr)}",
    )
    for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
        assert all(label in series["metric"] for series in found), f"no label {label} in {found}"
    names = [
        re.sub(r"\{\{(\w+)\}\}", lambda label, one=series: one["metric"][label[1]], query.legend) for series in found
    ]
    assert not query.legend or len(set(names)) == len(names), "two lines have one name"


def test_the_variables_offer_what_is_there(prometheus: Prometheus) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert list(variables) == ["datasource", "job", "instance"]
    for name in ("job", "instance"):
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variables[name]["query"]["query"]).groups()
        assert label == name
        assert eventually(
            lambda label=label, selector=selector: prometheus.ask(
                f"label/{label}/values", **{"match[]": filled(selector)}
            )
        )


def test_the_rules_are_loaded_and_evaluated_without_errors(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: all(rule["health"] == "ok" for rule in rules()), "every rule was evaluated")
    firing = {
        alert["labels"]["alertname"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"
    }
    assert firing == set()


def test_every_query_keeps_to_the_chosen_jobs_and_instances() -> None:
    for query in queries():
        for matchers in re.findall(r"\{([^{}]*)\}", query.expr):
            assert matchers.startswith('job=~"$job", instance=~"$instance"'), query.about
        assert "{" in query.expr


def test_an_annotation_asks_the_same_in_the_form_of_every_grafana() -> None:
    asking = [one for one in DASHBOARD["annotations"]["list"] if "expr" in one]
    assert asking
    for annotation in asking:  # Grafana 10 reads it from the annotation itself, later ones from its target
        assert annotation["target"]["expr"] == annotation["expr"]


def test_every_line_names_its_instance_unless_instances_are_summed_up() -> None:
    for query in queries():
        if query.legend:
            assert ("{{instance}}" in query.legend) != ("sum by (le)" in query.expr), query.about


def test_no_two_panels_overlap_and_each_fits_on_the_grid() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS, panel["title"]
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


def test_no_line_of_panels_has_a_gap() -> None:
    widths: dict[int, int] = {}
    for panel in panels():
        widths[panel["gridPos"]["y"]] = widths.get(panel["gridPos"]["y"], 0) + panel["gridPos"]["w"]
    assert set(widths.values()) == {COLUMNS}, widths
    heights = {panel["gridPos"]["y"]: panel["gridPos"]["h"] for panel in panels()}
    starts = sorted(heights)
    assert all(start + heights[start] == following for start, following in itertools.pairwise(starts))


def test_ids_count_through_the_panels_and_titles_are_unique() -> None:
    assert [panel["id"] for panel in panels()] == list(range(1, len(panels()) + 1))
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("panel", [panel for panel in panels() if panel["type"] != "row"], ids=lambda one: one["title"])
def test_every_panel_says_what_it_shows_and_in_which_unit(panel: dict[str, Any]) -> None:
    assert panel["type"] in KINDS
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
    if panel["type"] == "heatmap":
        assert panel["options"]["yAxis"]["unit"] == "s"
        return
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert panel["type"] == "table" or all(target["legendFormat"] for target in panel["targets"])


def test_the_file_is_tidy() -> None:
    text = PATH.read_text()
    assert text.isascii()
    assert len(text) < MAX_BYTES
    assert text == json.dumps(DASHBOARD, indent=2, sort_keys=True) + "\n"
    assert DASHBOARD["id"] is None
    assert {panel["type"] for panel in panels()} <= KINDS
