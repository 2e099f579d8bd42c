"""Centre and scale per metric: moments over blocks of rows, their scaler, and scaling itself. Pure numpy.

Owns the rules for constant metrics and for values far out. Never reads or writes files. Moments of blocks are merged
pairwise as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979: no sum of squares of raw values is ever formed, so counters near 1e12 with steps of 100 keep all digits of their
variance.
"""

# N rows of a block, D metrics
# ruff: noqa: N802, N803, N806, N815  (arrays carry their shape)

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retraind.report import Scaler

Floats = NDArray[np.float64]

# Rounding of float64 leaves a spread of about 1e-16 of the mean in a metric that never changes; a metric that does
# change by less than a millionth of a millionth of its value holds nothing to learn, only noise to blow up.
CONSTANT_RATIO = 1e-12
# Beyond so many deviations a scaled value grows with its logarithm only: one burst of one metric must not decide what
# is learned, and the largest float64 still fits into a float16. Measured on labelled machines, docs/ARCHITECTURE.md.
SOFT_LIMIT = 4.0


@dataclass(frozen=True)
class Moments:
    """Rows, and per metric how many of them have a value, its mean and its sum of squared deviations.

    All three are 0 for a metric without a value, which so counts as constant.
    """

    num_rows: int
    num_D: NDArray[np.int64]
    mean_D: Floats
    squares_D: Floats

    @classmethod
    def of_nothing(cls, num_metrics: int) -> "Moments":
        """The moments of no rows."""
        return cls(0, np.zeros(num_metrics, np.int64), np.zeros(num_metrics), np.zeros(num_metrics))

    @property
    def num_missing_D(self) -> NDArray[np.int64]:
        return self.num_rows - self.num_D

    @property
    def std_D(self) -> Floats:
        """The population's standard deviation."""
        return np.sqrt(self.squares_D / np.maximum(self.num_D, 1))

    @property
    def is_constant_D(self) -> NDArray[np.bool_]:
        return self.std_D <= CONSTANT_RATIO * np.abs(self.mean_D)

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both sets of rows together."""
        if not self.num_rows or not other.num_rows:
            return self if self.num_rows else other
        num_D = self.num_D + other.num_D
        share_D = other.num_D / np.maximum(num_D, 1)  # 1 for what has its first values here: then nothing is rounded
        step_D = other.mean_D - self.mean_D
        mean_D = self.mean_D + step_D * share_D
        squares_D = self.squares_D + other.squares_D + step_D**2 * (self.num_D * share_D)
        return Moments(self.num_rows + other.num_rows, num_D, mean_D, squares_D)

    def scaler(self) -> Scaler:
        """The centre is the mean; the scale is the standard deviation, or 1.0 for a constant metric."""
        scale_D = np.where(self.is_constant_D, 1.0, self.std_D)
        return Scaler(centre=self.mean_D.tolist(), scale=scale_D.tolist(), soft_limit=SOFT_LIMIT)


def moments_of(rows_ND: Floats) -> Moments:
    """Of one block, shape (N, D), in two passes over it; what rounding leaves in the second is taken out again.

    NaN is a missing value and has no part in them.
    """
    num_rows, num_metrics = rows_ND.shape
    if num_rows == 0:
        return Moments.of_nothing(num_metrics)
    num_D, first_D = np.full(num_metrics, num_rows), rows_ND[0]
    # Relative to the first row, so that the mean of a metric that never changes is that value and nothing else.
    shifted_ND = rows_ND - first_D
    offset_D = shifted_ND.sum(axis=0) / num_rows
    is_gap_ND = None
    if np.isnan(offset_D).any():  # only then is the block looked at value by value
        is_gap_ND = np.isnan(rows_ND)
        num_D = num_rows - is_gap_ND.sum(axis=0)
        first_D = np.where(num_D > 0, rows_ND[np.argmin(is_gap_ND, axis=0), np.arange(num_metrics)], 0.0)
        shifted_ND = np.where(is_gap_ND, 0.0, rows_ND - first_D)
        offset_D = shifted_ND.sum(axis=0) / np.maximum(num_D, 1)
    shifted_ND -= offset_D
    if is_gap_ND is not None:
        shifted_ND[is_gap_ND] = 0.0
    rest_D = shifted_ND.sum(axis=0)
    squares_D = np.einsum("nd,nd->d", shifted_ND, shifted_ND) - rest_D**2 / np.maximum(num_D, 1)
    return Moments(num_rows, num_D, first_D + offset_D, np.maximum(squares_D, 0.0))


def scale(values_ND: Floats, scaler: Scaler) -> NDArray[np.float32]:
    """(values - centre) / scale, computed in float64 and rounded once to float32, in C order. Shapes (N, D)."""
    scaled_ND = values_ND - np.asarray(scaler.centre)
    scaled_ND /= np.asarray(scaler.scale)
    return np.ascontiguousarray(scaled_ND, dtype="<f4")


def soften(scaled_ND: NDArray[np.float32], limit: float | None = SOFT_LIMIT) -> NDArray[np.float32]:
    """Compresses, in place, values beyond `limit` to limit x (1 + ln(|value| / limit)), with their sign. None: nothing.

    The slope is continuous at the limit. NaN stays what it is. Costs one comparison where nothing is beyond.
    """
    if limit is None:
        return scaled_ND
    beyond = np.abs(scaled_ND) > limit
    if beyond.any():
        far = scaled_ND[beyond].astype(np.float64)
        scaled_ND[beyond] = np.copysign(limit * (1 + np.log(np.abs(far) / limit)), far)
    return scaled_ND


def harden(softened: Floats, limit: float | None) -> Floats:
    """The scaled values that `soften` made these of, of any shape."""
    if limit is None:
        return softened
    size = np.abs(softened)
    with np.errstate(over="ignore"):
        return np.where(size > limit, np.copysign(limit * np.exp(size / limit - 1), softened), softened)
