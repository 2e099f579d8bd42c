"""Moments, the rule for constant metrics, and scaling."""

import numpy as np
import pytest

from retraind.report import Scaler
from retraind.worker.scaler import SOFT_LIMIT, Moments, harden, moments_of, scale, soften


def merged(blocks):
    total = Moments.of_nothing(blocks[0].shape[1])
    for block in blocks:
        total = total.merged(moments_of(block))
    return total


@pytest.mark.parametrize("sizes", [[1000], [1, 999], [0, 500, 0, 500], [7] * 142 + [6], [1] * 1000])
def test_moments_do_not_depend_on_how_rows_are_cut_into_blocks(sizes):
    rows = np.random.default_rng(1).normal(5.0, 3.0, size=(1000, 4)) * [1e-9, 1.0, 1e3, 1e12]
    moments = merged(np.split(rows, np.cumsum(sizes)[:-1]))
    assert moments.num_rows == 1000
    np.testing.assert_allclose(moments.mean_D, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.std_D, rows.std(axis=0), rtol=1e-12)


@pytest.mark.parametrize("sizes", [[1000], [1, 999], [0, 500, 0, 500], [7] * 142 + [6], [1] * 1000])
def test_moments_are_of_the_values_that_are_there(sizes):
    rng = np.random.default_rng(3)
    rows = rng.normal(5.0, 3.0, size=(1000, 4)) * [1e-9, 1.0, 1e3, 1e12]
    rows[rng.random(rows.shape) < 0.4] = np.nan
    rows[:990, 3] = np.nan  # the first value of a metric comes late
    moments = merged(np.split(rows, np.cumsum(sizes)[:-1]))
    assert moments.num_missing_D.tolist() == np.isnan(rows).sum(axis=0).tolist()
    np.testing.assert_allclose(moments.mean_D, np.nanmean(rows, axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.std_D, np.nanstd(rows, axis=0), rtol=1e-12)


@pytest.mark.parametrize("value", [0.1, 1.1e12])
def test_gaps_leave_a_constant_metric_its_value_and_one_without_a_value_is_constant(value):
    rows = np.full((1001, 2), np.nan)
    rows[5::3, 0] = value
    moments = merged(np.split(rows, [1, 4, 400]))
    assert moments.is_constant_D.all()
    assert (moments.mean_D[0], moments.mean_D[1], moments.num_D.tolist()) == (value, 0.0, [332, 0])


def test_a_counter_near_a_million_millions_keeps_its_spread():
    counter = 1e12 + 100.0 * np.arange(10_000)
    moments = merged(np.split(counter[:, None], 10))
    assert not moments.is_constant_D.any()
    assert moments.std_D[0] == pytest.approx(100.0 * np.sqrt((10_000**2 - 1) / 12), rel=1e-9)
    scaled = scale(counter[:, None], moments.scaler())
    assert np.unique(scaled).size == 10_000
    assert scaled.std() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 5.0, 0.1, -1e-300, 1.1e12, 18446744073709551615.0])
def test_a_metric_that_never_changes_is_constant_and_scales_to_exactly_zero(value):
    rows = np.full((1001, 1), value)
    moments = merged(np.split(rows, [1, 400]))
    assert moments.is_constant_D.all()
    scaler = moments.scaler()
    assert scaler == Scaler(centre=[value], scale=[1.0], soft_limit=SOFT_LIMIT)
    assert not scale(rows, scaler).any()


@pytest.mark.parametrize(("spread", "is_constant"), [(1e-13, True), (1e-14, True), (1e-10, False), (1e-3, False)])
def test_noise_far_below_the_value_is_no_signal(spread, is_constant):
    rows = 5.0 + spread * np.where(np.arange(1000) % 2, 1.0, -1.0)
    assert moments_of(rows[:, None]).is_constant_D[0] == is_constant


def test_scale_is_exact_to_float32_in_c_order():
    rows = np.asfortranarray(np.random.default_rng(2).normal(1e6, 1.0, size=(100, 3)))
    scaler = Scaler(centre=[1e6, 1e6 + 1, 0.0], scale=[1.0, 2.0, 1e6], soft_limit=SOFT_LIMIT)
    scaled = scale(rows, scaler)
    assert scaled.dtype == np.dtype("<f4")
    assert scaled.flags.c_contiguous
    np.testing.assert_array_equal(scaled, ((rows - scaler.centre) / scaler.scale).astype(np.float32))


def test_the_largest_values_of_float32_have_finite_moments():
    rows = np.array([[3.4e38], [-3.4e38], [1.0]])
    moments = merged(np.split(rows, 3))
    assert np.isfinite(moments.std_D).all()
    assert np.isfinite(scale(rows, moments.scaler())).all()


def test_values_far_out_grow_with_their_logarithm_and_fit_into_float16():
    values = np.array([0, 1, -4, 4, 4 * np.e, -4 * np.e, 1e30, np.nan], np.float32)
    softened = soften(values.copy())
    assert softened[:7].tolist() == pytest.approx([0, 1, -4, 4, 8, -8, 4 * (1 + np.log(1e30 / 4))], rel=1e-5)
    assert np.isnan(softened[7])
    assert np.abs(softened[:7]).max() < 65_504
    assert harden(softened[:6].astype(float), SOFT_LIMIT).tolist() == pytest.approx(values[:6].tolist(), rel=1e-4)
    assert soften(values.copy(), None)[:7].tolist() == values[:7].tolist()
