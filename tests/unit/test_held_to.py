"""When the next dataset must have the published model's metrics, and when it decides by itself."""

import msgspec
import pytest
from builders import make_dataset, make_manifest

from retraind import typed_json
from retraind.column_rules import ColumnRules, rules_of
from retraind.config import DataConfig
from retraind.report import Manifest
from retraind.supervisor.versions import held_to

ASKED = DataConfig(include=("m*",), schema={"m1": "ignore"})


def manifest_by(data: DataConfig) -> Manifest:
    return make_manifest(["m0", "m2"], dataset=make_dataset(rules=rules_of(data)))


@pytest.mark.parametrize(
    ("live", "now", "is_held"),
    [
        (DataConfig(), DataConfig(), True),
        (ASKED, ASKED, True),
        (DataConfig(), DataConfig(max_bad_share=0.5), True),
        (DataConfig(), DataConfig(metrics="own"), False),
        (DataConfig(), ASKED, False),  # who changes the rules wants another model
        (ASKED, DataConfig(), False),
        (ASKED, DataConfig(include=("m*",), schema={"m1": "label"}), False),
    ],
)
def test_the_published_list_holds_until_the_rules_change(live: DataConfig, now: DataConfig, *, is_held: bool) -> None:
    manifest = manifest_by(live)
    held = held_to(manifest, now)
    assert (held is not None) is is_held
    if held is not None:
        assert (held.version, held.metric_names) == (manifest.version, manifest.metric_names)


def test_without_a_published_model_nothing_is_held() -> None:
    assert held_to(None, DataConfig()) is None


def test_the_rules_of_an_earlier_release_are_the_defaults() -> None:
    written = msgspec.json.decode(msgspec.json.encode(manifest_by(DataConfig())))
    del written["dataset"]["rules"], written["dataset"]["held_to"]
    manifest = typed_json.decode(msgspec.json.encode(written), Manifest)
    assert manifest.dataset.rules == ColumnRules()
    assert held_to(manifest, DataConfig()) is not None
