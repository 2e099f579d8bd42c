"""Files of time series as people have them, which lie beside the repository and not in it.

The figures were found without any of the product's code: by prometheus_client's parser for exposition, by a split of
characters for line protocol, by the json module and pandas for the others. Where a file is one row, a second one is
made of it.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from reading import Everything, Read, refusal

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.ingest import describe

FORMATS = Path(__file__).parents[2].parent / "shared" / "data" / "formats"


def real(name):
    path = FORMATS / name
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/formats/{name} relative to the repository root")
    return path


def test_every_file_at_hand_has_its_figures_or_its_refusal_in_a_test():
    if not FORMATS.is_dir():
        pytest.skip("needs ../shared/data/formats relative to the repository root")
    written = "".join(path.read_text() for path in (Path(__file__), Path(__file__).with_name("test_real_tables.py")))
    names = [str(path.relative_to(FORMATS)) for path in FORMATS.rglob("*") if path.is_file()]
    assert [name for name in names if f'"{name}"' not in written] == []


@pytest.mark.parametrize(
    ("name", "num_series", "log_sum", "some"),
    [
        ("node_exporter/linux.prom", 3027, 16049.711798690134, ("node_cpu_seconds_total{", 64, 94008.71)),
        ("node_exporter/freebsd.prom", 106, 361.6622957379193, ("node_cpu_", 0, 0.0)),
        ("openmetrics/dovecot.txt", 90, 185.90903359961783, ("dovecot_imap_command_total{", 0, 0.0)),
    ],
)
def test_a_scrape_is_one_row_of_all_its_series(tmp_path, name, num_series, log_sum, some):
    path = real(name)
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig())
    assert raised.value.code == "too_few_rows"
    assert "append many" in raised.value.remedy
    data = path.read_bytes().rstrip() + b"\n"
    read = Read(tmp_path, data * 3)
    assert read.rows.shape == (3, num_series)
    assert (read.rows == read.rows[0]).all()
    assert math.fsum(np.log1p(np.abs(read.rows[0]))) == pytest.approx(log_sum, rel=1e-12)
    prefix, num, total = some
    if num:
        chosen = [k for k, series in enumerate(read.names) if series.startswith(prefix)]
        assert len(chosen) == num
        assert math.fsum(read.rows[0, chosen]) == pytest.approx(total, rel=1e-12)


def test_points_of_one_time_are_one_row_by_measurement_tags_and_field(tmp_path):
    path = real("influx/influxdb_cloud1.lp")
    with pytest.raises(DataError) as raised:
        describe([path], DataConfig())
    assert raised.value.code == "too_few_rows"
    data = path.read_bytes()
    read = Read(tmp_path, data + data.replace(b" 1717163790675899148\n", b" 1717163800675899148\n"))
    assert read.rows.shape == (2, 1552)
    assert list(read.ignored.values()) == ["not_numeric"] * 13
    assert math.fsum(read.rows[1]) == pytest.approx(1.7171698178836762e18, rel=1e-15)
    chosen = [k for k, series in enumerate(read.names) if series.startswith("influxdb_httpd")]
    assert math.fsum(read.rows[0, chosen]) == 9570368073750.0


def test_points_without_time_stamps_are_refused_and_with_them_read(tmp_path):
    path = real("influx/turbostat_intel.lp")
    error = refusal(tmp_path, path.read_bytes())
    assert (error.code, error.line) == ("malformed", 1)
    assert "no time stamp" in error.message
    stamped = b"".join(
        re.sub(rb"(?m)$", b" %d" % (1_717_163_790 + i), path.read_bytes().rstrip()) + b"\n" for i in (0, 5)
    )
    read = Read(tmp_path, stamped)
    assert read.rows.shape == (2, 1009)
    assert math.fsum(read.rows[0]) == pytest.approx(236288.89, rel=1e-12)


def test_many_values_of_a_series_in_one_second_are_refused(tmp_path):
    error = refusal(tmp_path, real("grafana/long_semicolon_bom_null.csv").read_bytes())
    assert (error.code, error.line) == ("malformed", 5)
    assert "Probe-1 has two values at one time, 48.1875 and 48.46875" in error.message


def test_series_out_of_step_share_no_row():
    with pytest.raises(DataError) as raised:
        describe([real("prometheus/range_missing.json")], DataConfig())
    assert raised.value.code == "too_many_missing"
    assert "5 of 10 cells" in raised.value.message
    assert 'go_goroutines{job="prometheus"} 40%' in raised.value.message


def test_a_series_of_nothing_but_nan_is_no_metric():
    with pytest.raises(DataError) as raised:
        describe([real("prometheus/range_nan.json")], DataConfig())
    assert raised.value.code == "no_numeric"
    assert "empty" in raised.value.message


def test_a_report_of_a_machine_whose_devices_change_has_rows_with_missing_cells(tmp_path):
    path = real("sysstat/sadf-j.json")
    dataset, _ = describe([path], DataConfig())
    # Counted beside the readers: 1,432 paths in all, of which the five entries lack 1,273 together.
    assert (dataset.num_rows, len(dataset.metric_names), dataset.num_missing_cells) == (5, 1432, 1273)
    document = json.loads(path.read_bytes())
    kept = ("timestamp", "process-and-context-switch", "paging", "io", "memory", "queue")
    for host in document["sysstat"]["hosts"]:
        host["statistics"] = [{key: entry[key] for key in kept} for entry in host["statistics"]]
    read = Read(tmp_path, json.dumps(document).encode())
    assert read.rows.shape == (5, 47)
    assert [math.fsum(row) for row in read.rows] == pytest.approx(
        [50780538.15, 68758327.52, 50776716.8, 50825166.97, 50845032.49], rel=1e-12
    )
    assert read.rows[0, read.names.index("queue.ldavg-15")] == 3.43


def test_a_metric_stream_in_its_envelope_is_a_series_for_each_statistic(tmp_path):
    data = real("cloudwatch/metric_streams_records.json").read_bytes()
    assert refusal(tmp_path, data).code == "too_many_columns"  # 4608 series: a whole account
    document = json.loads(data)
    read = Read(tmp_path, json.dumps(document | {"records": document["records"][:2]}).encode(), Everything())
    assert (read.format, read.rows.shape) == ("cloudwatch", (4, 2300))
    assert np.count_nonzero(~np.isnan(read.rows), axis=1).tolist() == [44, 524, 540, 1208]
    sums = {"max": 10515189685.548372, "min": 4376376593.740096, "sum": 11382292826.807701, "count": 2120.0}
    for statistic, total in sums.items():
        chosen = [k for k, name in enumerate(read.names) if f"/{statistic}{{" in name or name.endswith(f"/{statistic}")]
        assert np.nansum(read.rows[:, chosen]) == pytest.approx(total, rel=1e-12)
    name = '549734399709/us-west-2/AWS/EC2/DiskReadBytes/count{InstanceType="m5ad.2xlarge"}'
    assert read.rows[3, read.names.index(name)] == 3.0


def test_a_trace_of_containers_is_a_series_for_each(tmp_path):
    read = Read(tmp_path, real("alibaba/pod_gpu_duty_cycle_anon.tar.gz").read_bytes(), Everything())
    assert (read.format, read.rows.shape) == ("csv-long+tar", (1441, 143))
    assert np.count_nonzero(~np.isnan(read.rows)) == 157417
    assert np.nansum(read.rows) == pytest.approx(1105882.4293983562, rel=1e-12)
    totals = dict(zip(read.names, np.nansum(read.rows, axis=0).tolist(), strict=True))
    assert totals["23b8eba99c14e73d454503a55ae96989"] == pytest.approx(17613.561070640724, rel=1e-12)
    assert totals["ae3389e2979abd8ba8c1eeb9868697e0"] == pytest.approx(8331.066666666668, rel=1e-12)


def test_a_table_of_columns_is_read_by_type(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow, which is optional")
    read = Read(tmp_path, real("parquet/telegraf_dense.parquet").read_bytes())
    assert read.ignored == {"tag": "not_numeric", "str_field": "not_numeric", "timestamp": "time"}
    assert read.rows.tolist() == [[64.0 + i] for i in range(7)]
    read = Read(tmp_path, real("parquet/telegraf_datatypes.parquet").read_bytes())
    assert read.names == ["int32", "int64", "float32", "float64"]
    assert read.rows[0].tolist() == [-(2.0**31), -(2.0**63), 1.0, 64.0]


def test_counters_that_begin_late_are_missing_cells_before(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow, which is optional")
    path = real("parquet/rezolus_metrics_zstd.parquet")
    dataset, _ = describe([path], DataConfig())
    assert (dataset.num_rows, dataset.num_missing_cells) == (30, 1 + 4 + 20 + 29 + 29)
    assert [found.num_cells for found in dataset.most_missing] == [29, 29, 20, 4, 1]
    read = Read(tmp_path, path.read_bytes(), Everything())
    assert read.rows.shape == (30, 916)
    num_gaps = np.count_nonzero(np.isnan(read.rows), axis=0)
    assert sorted(num_gaps[num_gaps > 0].tolist()) == [1, 4, 20, 29, 29]
    assert sorted(read.ignored.values()) == ["not_numeric"] * 33 + ["time"]  # the lists of histograms, and the time
    totals = dict(zip(read.names, np.nansum(read.rows, axis=0).tolist(), strict=True))
    assert totals["duration"] == 229613312
    assert totals["cgroup_cpu_usage//user.slice/system/7"] == 2640000000
    assert totals["cgroup_cpu_usage//system.slice/systemslab-agent.service/user/47"] == 61858700000000
