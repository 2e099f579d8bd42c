"""The published model as a detector: faults of known kinds score above 1 and are named, clean rows seldom do."""

import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from scoring_data import METRICS, clean_rows, publish

from retraind import load_model
from retraind.config import TrainingConfig
from retraind.errors import HostError
from retraind.report import Manifest
from retraind.worker.model import build, folded

WINDOW = TrainingConfig().window


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model of 20,000 rows, trained until it knows how the metrics hang together."""
    return publish(tmp_path_factory.mktemp("models"), clean_rows(20_000, seed=1))


@pytest.fixture(scope="module")
def detector(home):
    return load_model(home)


def worst(detector, row):
    """The three metrics with the greatest errors of one row, and the one with the greatest z-score."""
    errors, z = detector.explain(row)
    by_error = [detector.metric_names[place] for place in np.argsort(-errors[0])[:3]]
    return by_error, detector.metric_names[int(np.abs(z[0]).argmax())]


def test_importing_retraind_loads_nothing_heavy_and_the_first_call_does(home):
    code = (
        "import sys, retraind\n"
        "assert not {'torch', 'numpy', 'pandas', 'msgspec', 'retraind.worker'} & set(sys.modules)\n"
        "print(retraind.load_model(sys.argv[1]).version, 'torch' in sys.modules, 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [load_model(home).version, "True", "False"]


def test_the_share_of_alarms_on_clean_rows_is_near_the_target(detector):
    """100 of 100,000 are asked for, by the errors of 2,000 rows: their third largest, which is off by a factor."""
    share = (detector.score(clean_rows(100_000, seed=2)) > 1).mean()
    assert 0.0001 < share < 0.005


def faults():
    """Rows of one moment with one fault each, and the metric that it is in."""
    normal = clean_rows(50_000, seed=3)
    busy = normal[normal[:, 0] > np.quantile(normal[:, 0], 0.98)][:1]
    quiet = normal[normal[:, 0] < np.quantile(normal[:, 0], 0.02)][:1]
    spread = normal.std(axis=0)
    spike, stuck, shift, swapped = busy.copy(), busy.copy(), quiet.copy(), busy.copy()
    spike[0, 5] += 12 * spread[5]
    stuck[0, 6] = quiet[0, 6]  # a value as it is at night, while all others are as they are by day
    shift[0, 7] += 6 * spread[7]
    swapped[0, [2, 6]] = swapped[0, [6, 2]]  # their units differ: each is far from its own mean
    return {"spike": (spike, {5}), "stuck": (stuck, {6}), "shift": (shift, {7}), "swapped": (swapped, {2, 6})}


@pytest.mark.parametrize("kind", ["spike", "stuck", "shift", "swapped"])
def test_a_fault_scores_above_one_and_its_metric_is_named(detector, kind):
    row, places = faults()[kind]
    assert detector.score(row)[0] > 1
    by_error, by_z = worst(detector, row)
    names = {METRICS[place] for place in places}
    if kind == "stuck":  # a value that is usual by itself: only the net can know it to be wrong
        assert names & set(by_error)
    else:  # the net follows an unheard-of value, and the error shows up in its neighbours
        assert by_z in names


def test_a_score_is_the_mean_of_the_errors_over_the_threshold(detector):
    rows = clean_rows(1000, seed=4)
    expected = detector.errors(rows).astype(np.float64).mean(axis=1) / detector.threshold
    assert detector.score(rows) == pytest.approx(expected, rel=1e-5)
    assert detector.score(rows).dtype == detector.errors(rows).dtype == np.float32
    assert detector.errors(rows).shape == rows.shape


def test_the_folded_network_answers_as_the_published_weights_do(home):
    version = (home / "current").resolve()
    network = build(len(METRICS) * WINDOW, seed=9)
    network.load_state_dict(torch.load(version / "weights.pt", weights_only=True))
    x = torch.randn(1000, len(METRICS) * WINDOW, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = network.eval()(x).numpy()
    assert folded(network)(x).detach().numpy() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_scores_do_not_depend_on_how_rows_are_cut_into_calls_or_kept_in_memory(detector):
    rows = clean_rows(30_000, seed=6)  # more than two blocks
    whole = detector.score(rows)
    parts = np.concatenate(
        [detector.score(rows[:7]), detector.score(rows[7:9], rows[:7]), detector.score(rows[9:], rows[:9])]
    )
    assert parts == pytest.approx(whole, rel=1e-5)
    as_table = np.asfortranarray(rows)  # as the columns of a data frame lie
    assert (detector.score(as_table) == whole).all()
    assert detector.score(as_table[9:], np.asfortranarray(rows[:9])) == pytest.approx(whole[9:], rel=1e-5)
    assert detector.score(as_table[9:10], rows[:9]) == pytest.approx(whole[9:10], rel=1e-5)
    assert detector.score(rows.astype(np.float32)) == pytest.approx(whole, rel=1e-2)
    assert detector.score(rows[:0]).shape == (0,)
    assert len(detector.score(rows[:3].tolist())) == 3


def test_the_callers_array_and_torchs_threads_stay_as_they_were(detector):
    rows = clean_rows(100, seed=7)
    rows.flags.writeable = False
    torch.set_num_threads(2)
    try:
        detector.score(rows)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_missing_value_has_no_part_in_a_score_and_a_row_of_nothing_has_none(detector, value):
    rows = clean_rows(30, seed=8)
    clean = detector.score(rows)
    rows[20, 4] = value
    rows[25] = value
    scores = detector.score(rows)
    assert np.isnan(scores).nonzero()[0].tolist() == [25]
    assert scores[:20] == pytest.approx(clean[:20], rel=1e-5)
    assert (scores[20:25] < 2).all()  # as unremarkable as with the value
    assert np.isnan(detector.errors(rows)[25]).all()


def test_a_value_beyond_all_measure_is_an_anomaly_and_not_a_gap(detector):
    rows = clean_rows(30, seed=9)
    rows[20, 0] = 1e300
    scores = detector.score(rows)
    assert scores[20] > 10
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    "rows", [np.zeros(8), np.zeros((2, 7)), np.zeros((1, 1, 8)), np.array([["1"] * 8]), np.zeros((1, 8), complex)]
)
def test_an_array_that_does_not_fit_is_refused_in_words(detector, rows):
    with pytest.raises(ValueError, match="expected"):
        detector.score(rows)


@pytest.mark.parametrize("what", ["home", "version", "current", "weights"])
def test_a_model_is_found_by_any_of_its_paths(home, what):
    version = (home / "current").resolve()
    paths = {"home": home, "version": version, "current": home / "current", "weights": version / "weights.pt"}
    assert load_model(str(paths[what])).version == version.name


def copied(home, tmp_path):
    return shutil.copytree((home / "current").resolve(), tmp_path / "version")


def test_where_nothing_is_published_the_error_says_what_to_do(tmp_path):
    with pytest.raises(HostError, match="retraind train") as caught:
        load_model(tmp_path)
    assert caught.value.code == "no_model"
    assert caught.value.exit_status == 69


def test_one_flipped_bit_of_the_weights_is_noticed_before_they_are_loaded(home, tmp_path):
    weights = copied(home, tmp_path) / "weights.pt"
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(HostError, match="not what was published") as caught:
        load_model(weights.parent)
    assert caught.value.code == "host_io"


def test_a_version_without_a_threshold_is_no_model_to_score_with(home, tmp_path):
    path = copied(home, tmp_path) / "manifest.json"
    path.chmod(0o644)
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, threshold=None)))
    with pytest.raises(HostError, match="train it anew") as caught:
        load_model(path.parent)
    assert caught.value.code == "no_model"


def test_a_damaged_manifest_is_named(home, tmp_path):
    path = copied(home, tmp_path) / "manifest.json"
    path.chmod(0o644)
    path.write_text("{}")
    with pytest.raises(HostError, match=r"manifest\.json is damaged"):
        load_model(path.parent)


def test_a_model_without_a_window_judges_each_row_alone(tmp_path):
    rows = clean_rows(3000, seed=1)
    alone = load_model(publish(tmp_path, rows, settings="training: {window: 1}\n"))
    assert alone.reach == 1
    whole = alone.score(rows)
    assert alone.score(rows[1700:1701]) == pytest.approx(whole[1700:1701], rel=1e-5)
    assert alone.score(rows[::-1]) == pytest.approx(whole[::-1], rel=1e-5)
    assert alone.score(rows[5:9], rows[:5]) == pytest.approx(whole[5:9], rel=1e-5)
