"""Centre and scale per metric: moments over blocks of rows, their scaler, and scaling itself. Pure numpy.

Owns the rules for constant metrics and for values far out. Never reads or writes files. Moments of blocks are merged
pairwise as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979: no sum of squares of raw values is ever formed, so counters near 1e12 with steps of 100 keep all digits of their
variance.
"""

# N rows of a block, D metrics
# ruff: noqa: N802, N803, N806, N815  (arrays carry their shape)

import math
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
    """Count, mean and sum of squared deviations per metric."""

    num_rows: int
    mean_D: Floats
    squares_D: Floats

    @property
    def std_D(self) -> Floats:
        """The population's standard deviation."""
        return np.sqrt(self.squares_D / max(self.num_rows, 1))

    @property
    def is_constant_D(self) -> NDArray[np.bool_]:
        return self.std_D <= CONSTANT_RATIO * np.abs(self.mean_D)

    def merged(self, other: "Moments") -> "Moments":
        """The moments of both sets of rows together."""
        total = self.num_rows + other.num_rows
        if not self.num_rows or not other.num_rows:
            return self if self.num_rows else other
        step_D = other.mean_D - self.mean_D
        mean_D = self.mean_D + step_D * (other.num_rows / total)
        squares_D = self.squares_D + other.squares_D + step_D**2 * (self.num_rows * other.num_rows / total)
        return Moments(total, mean_D, squares_D)

    def scaler(self) -> Scaler:
        """The centre is the mean; the scale is the standard deviation, or 1.0 for a constant metric."""
        scale_D = np.where(self.is_constant_D, 1.0, self.std_D)
        return Scaler(centre=self.mean_D.tolist(), scale=scale_D.tolist(), soft_limit=SOFT_LIMIT)


def moments_of(rows_ND: Floats) -> Moments:
    """Of one block, shape (N, D), in two passes over it; what rounding leaves in the second is taken out again."""
    num_rows, num_metrics = rows_ND.shape
    if num_rows == 0:
        return Moments(0, np.zeros(num_metrics), np.zeros(num_metrics))
    # Relative to the first row, so that the mean of a metric that never changes is that value and nothing else.
    shifted_ND = rows_ND - rows_ND[0]
    offset_D = shifted_ND.mean(axis=0)
    shifted_ND -= offset_D
    rest_D = shifted_ND.sum(axis=0)
    squares_D = np.einsum("nd,nd->d", shifted_ND, shifted_ND) - rest_D**2 / num_rows
    return Moments(num_rows, rows_ND[0] + offset_D, np.maximum(squares_D, 0.0))


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


def harden(softened: float, limit: float | None) -> float:
    """The scaled value that `soften` made this of."""
    if limit is None or abs(softened) <= limit:
        return softened
    return math.copysign(limit * math.exp(abs(softened) / limit - 1), softened)
