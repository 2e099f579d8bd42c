"""When data counts as drifted, in the service as in the rules for Prometheus."""

import re
from pathlib import Path

import msgspec
import pytest
import yaml
from builders import make_manifest

from retraind.report import Drift
from retraind.supervisor import account, drift

RULES = Path(__file__).resolve().parents[2] / "etc" / "prometheus" / "retraind.rules.yaml"


def seen(num_alarms: int, num_rows: int = 10_000, expected_share: float = 0.001) -> Drift:
    return Drift(version="000041-aaaaaaaaaaaa", num_rows=num_rows, num_alarms=num_alarms, expected_share=expected_share)


@pytest.mark.parametrize(
    ("found", "is_drift"),
    [
        (seen(0), False),
        (seen(10), False),
        (seen(200), False),  # a fault of some minutes
        (seen(201), True),
        (seen(10_000), True),
        (seen(900, expected_share=0.1), False),
        (seen(500, expected_share=0.005), False),
        (seen(501, expected_share=0.005), True),
        (seen(999, num_rows=999), False),
        (seen(1000, num_rows=1000), True),
        (seen(0, num_rows=0), False),
        (seen(10**400, num_rows=10**400), True),
    ],
)
def test_only_what_is_far_above_what_was_expected_is_drift(found: Drift, is_drift: bool) -> None:
    assert drift.has_drifted(found) is is_drift


def test_the_alert_has_the_same_limits() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    (alert,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == "RetraindDataDrifted"]
    numbers = [float(number) for number in re.findall(r"[0-9.]+", alert["expr"])]
    assert numbers == [drift.MIN_SHARE, drift.FACTOR, drift.MIN_ROWS]


def test_a_version_says_what_the_one_before_thought_of_its_data_and_whether_that_is_drift() -> None:
    manifest = make_manifest(["cpu", "load"])

    def version(found: Drift | None) -> tuple[dict[str, str], list[str]]:
        evaluation = msgspec.structs.replace(manifest.evaluation, drift=found)
        changed = msgspec.structs.replace(manifest, evaluation=evaluation)
        return dict(account.data(changed)), [text for kind, text in account.verdicts(changed) if "drifted" in text]

    words = "12.5 % of 10,000 rows are above the threshold of version 000041-aaaaaaaaaaaa, which was live; "
    words += "0.1 % were expected"
    facts, verdicts = version(seen(1250))
    assert facts["drift"] == words
    assert verdicts == [f"The data has drifted, or a fault lasts in it: {words}."]
    facts, verdicts = version(seen(12))
    assert facts["drift"].startswith("0.12 % of")
    assert verdicts == []
    facts, verdicts = version(None)
    assert "drift" not in facts
    assert verdicts == []
