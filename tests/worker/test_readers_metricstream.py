"""Deliveries of a CloudWatch metric stream, in Firehose's envelope and as the lines within."""

import base64
import json

import numpy as np
import pytest
from reading import Read, refusal

from retraind.worker.readers import document


def sample(minute, instance, **changes):
    return {
        "metric_stream_name": "all",
        "account_id": "123456789012",
        "region": "eu-central-1",
        "namespace": "AWS/EC2",
        "metric_name": "CPUUtilization",
        "dimensions": {"InstanceId": instance},
        "timestamp": 1_700_000_000_000 + 60_000 * minute,
        "value": {"max": 9.5 + minute, "min": 1.0, "sum": 20.25, "count": 2.0},
        "unit": "Percent",
    } | changes


def lines(*samples):
    return "".join(json.dumps(one) + "\n" for one in samples).encode()


def envelope(*records):
    packed = [{"data": base64.b64encode(record).decode()} for record in records]
    return json.dumps({"requestId": "c8", "timestamp": 1651679861072, "records": packed}, indent=2).encode()


def name(statistic, instance):
    return f'123456789012/eu-central-1/AWS/EC2/CPUUtilization/{statistic}{{InstanceId="{instance}"}}'


SAMPLES = [sample(minute, instance) for minute in range(10) for instance in ("i-1", "i-2")]


@pytest.mark.parametrize("data", [lines(*SAMPLES), envelope(lines(*SAMPLES[:7]), lines(*SAMPLES[7:]))])
def test_each_statistic_of_each_metric_is_a_series(tmp_path, data):
    read = Read(tmp_path, data)
    assert read.format == "cloudwatch"
    assert read.names == [name(stat, i) for stat in ("count", "max", "min", "sum") for i in ("i-1", "i-2")]
    assert read.rows.tolist() == [[2, 2, 9.5 + i, 9.5 + i, 1, 1, 20.25, 20.25] for i in range(10)]


def test_accounts_and_regions_are_told_apart_and_a_sample_again_counts_once(tmp_path):
    others = [sample(minute, "i-1", account_id="7", value={"p99": None if minute == 3 else 5}) for minute in range(10)]
    read = Read(tmp_path, lines(*SAMPLES, *others, *SAMPLES[:3]))
    assert read.names[-1] == '7/eu-central-1/AWS/EC2/CPUUtilization/p99{InstanceId="i-1"}'
    assert np.argwhere(np.isnan(read.rows)).tolist() == [[3, len(read.names) - 1]]


def test_a_last_line_that_was_cut_is_left_out(tmp_path):
    read = Read(tmp_path, lines(*SAMPLES)[:-20])
    assert np.argwhere(np.isnan(read.rows)).tolist() == [[9, i] for i in (1, 3, 5, 7)]


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (envelope(b"\x0a\x07protobuf"), "unsupported_format", "not JSON"),
        (envelope(lines(*SAMPLES)).replace(b'"data": "', b'"data": "*'), "malformed", "not base64"),
        (envelope(b'{"metric_stream_name": "all"}'), "malformed", "account_id"),
        (envelope(b'{"metric_stream_name": "all'), "truncated", "record 0"),
        (envelope(lines(*SAMPLES))[:-20], "truncated", "too early"),
        (lines(sample(0, "a", value={"max": "7"})), "malformed", "float"),
        (lines(sample(0, "a", timestamp=10**18)), "malformed", "out of range"),
        (lines(sample(0, "a"), sample(0, "a", value={"max": 1})), "malformed", "two values"),
        (lines(sample(0, "a", value={})), "no_rows", "no sample"),
        (envelope(), "no_rows", "no sample"),
    ],
)
def test_what_can_not_be_used_is_refused(tmp_path, data, code, words):
    error = refusal(tmp_path, data)
    assert error.code == code
    assert words in error.message
    assert error.remedy


def test_a_delivery_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", 2**12)
    assert refusal(tmp_path, envelope(lines(*SAMPLES))).code == "too_large"
    Read(tmp_path, lines(*SAMPLES))
