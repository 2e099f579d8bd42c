"""Which columns are metrics: rules of name and content, the operator's word, and a list that a dataset is held to."""

import io
import json

import numpy as np
import pytest
from reading import Read, refusal

from retraind.column_rules import ColumnRules, HeldTo
from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.ingest import describe
from retraind.worker.readers.columns import time_column

NAMES = ["ts", "cpu_user", "cpu_idle", "net_rx", "host", "label", "gone"]
ROWS = "".join(f"{1_700_000_000 + i},{i},{100 - i},{i * i},web,0,\n" for i in range(50))
TABLE = (",".join(NAMES) + "\n" + ROWS).encode()


def test_name_and_content_decide_where_nobody_says_anything(tmp_path):
    read = Read(tmp_path, TABLE)
    assert read.names == ["cpu_user", "cpu_idle", "net_rx"]
    assert read.ignored == {"ts": "time", "host": "not_numeric", "label": "label", "gone": "empty"}


@pytest.mark.parametrize(
    ("rules", "names", "ignored"),
    [
        ({"include": ("cpu_*",)}, ["cpu_user", "cpu_idle"], {"net_rx": "not_included", "host": "not_included"}),
        ({"include": ("net_rx", "cpu_?dle")}, ["cpu_idle", "net_rx"], {"cpu_user": "not_included", "ts": "time"}),
        ({"exclude": ("cpu_*", "nobody")}, ["net_rx"], {"cpu_user": "excluded", "cpu_idle": "excluded"}),
        ({"include": ("*",), "exclude": ("net*", "host")}, ["cpu_user", "cpu_idle"], {"host": "excluded"}),
        (
            {"schema": {"cpu_idle": "ignore", "gone": "metric"}},
            ["cpu_user", "net_rx", "gone"],
            {"cpu_idle": "excluded"},
        ),
        # a kind goes before patterns, names and content
        (
            {"schema": {"ts": "metric", "label": "metric", "net_rx": "time"}, "exclude": ("ts", "cpu*")},
            ["ts", "label"],
            {"net_rx": "time", "cpu_user": "excluded"},
        ),
        (
            {"schema": {"cpu_user": "identifier", "cpu_idle": "label", "nobody": "ignore"}},
            ["net_rx"],
            {"cpu_user": "identity", "cpu_idle": "label"},
        ),
    ],
)
def test_the_operators_word_goes_first(tmp_path, rules, names, ignored):
    read = Read(tmp_path, TABLE, max_missing_share=0.5, **rules)
    assert read.names == names
    assert ignored.items() <= read.ignored.items()
    assert sorted([*read.names, *read.ignored]) == sorted(NAMES)
    assert [row[names.index("cpu_idle")] for row in read.rows[:3].tolist() if "cpu_idle" in names] in (
        [],
        [100, 99, 98],
    )


@pytest.mark.parametrize(
    ("rules", "code", "words"),
    [
        ({"include": ("cpu_*", "disk_*")}, "missing_columns", "asks for: disk_*"),
        ({"include": ("CPU_user",)}, "missing_columns", "CPU_user"),
        ({"include": ("cpu_*", "host")}, "missing_columns", "host"),  # it is there, and no metric
        ({"schema": {"disk": "metric"}}, "missing_columns", "disk"),
        ({"schema": {"host": "metric"}}, "no_numeric", "hold text: host"),
        ({"exclude": ("*",)}, "no_numeric", "excluded: cpu_user"),
    ],
)
def test_what_is_asked_for_and_not_there_is_refused(tmp_path, rules, code, words):
    error = refusal(tmp_path, TABLE, **rules)
    assert error.code == code
    assert words in error.message
    assert error.remedy


def test_rules_hold_for_series_by_their_whole_name(tmp_path):
    lines = "".join(f'up{{job="{job}"}} {i} {1_700_000_000_000 + 15_000 * i}\n' for i in range(9) for job in ("a", "b"))
    read = Read(tmp_path, lines.encode(), include=('up{job="a*"}',))
    assert (read.names, read.ignored) == (['up{job="a"}'], {'up{job="b"}': "not_included"})


@pytest.mark.parametrize(
    ("names", "schema", "found"),
    [
        (["a", "Time"], {}, "Time"),
        (["a", "b"], {}, None),
        (["ts", "when"], {"when": "time"}, "when"),
        (["ts", "epoch"], {"ts": "metric"}, "epoch"),
    ],
)
def test_the_time_of_a_row_is_in_the_column_that_is_said_or_named_so(names, schema, found):
    assert time_column(names, DataConfig(schema=schema)) == found


HELD = HeldTo(version="000007-aaaaaaaaaaaa", metric_names=["b", "a"])


def written(path, columns):
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in columns_of(columns)))
    return path


def columns_of(columns):
    return [[len(name) + i for name in columns] for i in range(20)]


def test_a_dataset_has_the_metrics_of_the_published_model_in_their_order(tmp_path):
    path = written(tmp_path / "a.jsonl", ["a", "b", "c", "ts"])
    dataset, _ = describe([path], DataConfig(), held_to=HELD)
    assert (dataset.metric_names, dataset.held_to) == (["b", "a"], HELD.version)
    assert [(column.name, column.reason) for column in dataset.ignored_columns] == [("c", "extra"), ("ts", "time")]


def test_a_metric_of_the_published_model_that_is_missing_is_named_with_the_way_out(tmp_path):
    path = written(tmp_path / "a.jsonl", ["a", "c"])
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig(), held_to=HELD)
    assert raised.value.code == "missing_columns"
    assert raised.value.message == f"1 metrics of the published version {HELD.version} are missing: b"
    assert "data.metrics: own" in raised.value.remedy
    assert describe([path], DataConfig())[0].metric_names == ["a", "c"]


def test_arrays_have_no_names_and_are_held_by_position(tmp_path):
    held = HeldTo(version="000001-aaaaaaaaaaaa", metric_names=["column_0", "column_1", "column_2"])
    for num_columns, code in ((3, ""), (4, "ambiguous_columns"), (2, "missing_columns")):
        file = io.BytesIO()
        np.save(file, np.random.default_rng(1).normal(size=(30, num_columns)))
        (tmp_path / "a.npy").write_bytes(file.getvalue())
        if not code:
            assert describe([tmp_path / "a.npy"], DataConfig(), held_to=held)[0].metric_names == held.metric_names
            continue
        with pytest.raises(DataError) as raised:
            describe([tmp_path / "a.npy"], DataConfig(), held_to=held)
        assert raised.value.code == code


def test_a_dataset_says_by_which_rules_it_was_read(tmp_path):
    path = written(tmp_path / "a.jsonl", ["a", "bb", "c"])
    dataset, _ = describe([path], DataConfig(exclude=("b*",), schema={"c": "ignore"}))
    assert dataset.metric_names == ["a"]
    assert dataset.rules == ColumnRules(exclude=("b*",), schema={"c": "ignore"})
    assert dataset.held_to == ""
