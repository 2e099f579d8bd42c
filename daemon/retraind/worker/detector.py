"""A published version as what it is for: rows of raw values to errors by metric, z-scores and anomaly scores.

Owns how a version is found, checked and loaded, and how raw values become windows; `retraind.load_model` is this one.
Never trains, never writes, never reads a dataset, and leaves torch's settings as they were. Raises HostError no_model
where there is none that can score, host_io where its bytes are not those published; ValueError for a wrong array.
"""

# N rows, B rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from retraind import typed_json
from retraind.errors import HostError
from retraind.report import Manifest
from retraind.worker.model import TelemetryAutoencoder, build
from retraind.worker.rows import windows_of
from retraind.worker.scaler import soften
from retraind.worker.scorer import SCORER_NAME, Scorer, load

# The values of a block of float64 stay in a core's cache (1 MiB) through every step that is taken with them.
BLOCK_VALUES = 2**17
# A value so many deviations away is as strange as one can be, and the squares of a row still add up in float32.
MAX_SCALED = 1e15
REMEDY = "publish one first: drop a file into the spool, or run `retraind train`"

Scores = NDArray[np.float32]


class Detector:
    """One published version, whole and checked.

    Rows are consecutive: a row is judged with the `reach - 1` rows before it. Those before the first row of a call are
    given as `before_ND`, of which the last ones are used; without them the first row stands in for them. So scores do
    not depend on how rows are cut into calls.
    """

    def __init__(self, manifest: Manifest, scorer: Scorer) -> None:
        if manifest.threshold is None:
            raise HostError(
                "no_model", f"version {manifest.version} has no threshold to score by", remedy="train it anew"
            )
        self.manifest = manifest
        self.version = manifest.version
        self.metric_names = list(manifest.metric_names)
        self.threshold = manifest.threshold
        self.reach = scorer.reach
        self._scorer = scorer

    def score(self, rows_ND: ArrayLike, before_ND: ArrayLike | None = None) -> Scores:
        """One number a row, shape (N,): above 1 is anomalous. NaN for a row without a finite value.

        Takes raw values, shape (N, D), in the order of metric_names; a value that is not finite is a missing one, and
        has no part in the score. Of the metrics in manifest.dataset.rate_metrics it takes rates per second, which files
        are made to by `retraind score`. Raises ValueError for any other shape.
        """
        rows_ND = self._checked(rows_ND)
        scores_N = np.empty(len(rows_ND), np.float32)
        with _one_thread():
            for start, _, errors_BD in self._blocks(rows_ND, before_ND):
                scores_N[start : start + len(errors_BD)] = (errors_BD.mean(dim=1) / self.threshold).numpy()
        return scores_N

    def errors(self, rows_ND: ArrayLike, before_ND: ArrayLike | None = None) -> Scores:
        """Each metric's part in a row's error, shape (N, D); a row's mean over it is its error, score x threshold.

        NaN throughout for a row without a finite value. Raises ValueError as `score` does.
        """
        return self.explain(rows_ND, before_ND)[0]

    def explain(self, rows_ND: ArrayLike, before_ND: ArrayLike | None = None) -> tuple[Scores, Scores]:
        """What `errors` gives, and beside it the z-scores: each value's distance from its metric's mean, (N, D)."""
        rows_ND = self._checked(rows_ND)
        errors_ND, z_ND = np.empty(rows_ND.shape, np.float32), np.empty(rows_ND.shape, np.float32)
        with _one_thread():
            for start, z_BD, errors_BD in self._blocks(rows_ND, before_ND):
                z_ND[start : start + len(z_BD)] = z_BD
                errors_ND[start : start + len(z_BD)] = errors_BD.numpy()
        return errors_ND, z_ND

    def residuals(self, rows_ND: ArrayLike, before_ND: ArrayLike | None = None) -> NDArray[np.float64]:
        """What the net can not rebuild of each value, in the metric's own unit, shape (N, D), of either sign.

        Of values beyond the scaler's soft limit what it is given of them. Raises ValueError as `score` does.
        """
        rows_ND = self._checked(rows_ND)
        residuals_ND = np.empty(rows_ND.shape)
        with _one_thread():
            for start, _, windows_BF, has_missing in self._windows(rows_ND, before_ND):
                rest_BD = self._scorer.newest_residual(windows_BF, has_missing=has_missing)
                residuals_ND[start : start + len(rest_BD)] = rest_BD.numpy()
        residuals_ND *= np.asarray(self.manifest.scaler.scale)
        return residuals_ND

    def _checked(self, rows_ND: ArrayLike) -> NDArray[np.generic]:
        array = np.asarray(rows_ND)
        if array.ndim != 2 or array.shape[1] != len(self.metric_names):
            raise ValueError(f"rows of shape {array.shape}: (rows, {len(self.metric_names)}) is expected")
        if array.dtype.kind not in "fiu":
            raise ValueError(f"rows of type {array.dtype}: numbers are expected")
        return array

    def _blocks(
        self, rows_ND: NDArray[np.generic], before_ND: ArrayLike | None
    ) -> Iterator[tuple[int, Scores, Tensor]]:
        """Where a block begins, its z-scores and its errors by metric, (B, D) each."""
        for start, z_BD, windows_BF, has_missing in self._windows(rows_ND, before_ND):
            yield start, z_BD, self._scorer.errors(windows_BF, has_missing=has_missing)

    def _windows(
        self, rows_ND: NDArray[np.generic], before_ND: ArrayLike | None
    ) -> Iterator[tuple[int, Scores, Tensor, bool]]:
        """Where a block begins, its z-scores, (B, D), its windows, softened, and whether there is a gap in them."""
        step = max(1, BLOCK_VALUES // (len(self.metric_names) * self.reach))
        history_RD = self._scaled(self._checked(before_ND)[-self.reach :]) if before_ND is not None else None
        for start in range(0, len(rows_ND), step):
            z_BD = self._scaled(rows_ND[start : start + step])
            history_RD = self._history(z_BD[:1] if history_RD is None or not len(history_RD) else history_RD)
            slots_SD = np.concatenate([history_RD, z_BD])
            history_RD = slots_SD[len(z_BD) :].copy()
            soften(slots_SD, self.manifest.scaler.soft_limit)
            windows_BF = windows_of(torch.from_numpy(slots_SD), self.reach)
            has_missing = bool(np.isnan(slots_SD.sum()))  # a sum is as little a number as its parts
            yield start, z_BD, windows_BF, has_missing

    def _history(self, rows_RD: Scores) -> Scores:
        """The last reach - 1 of these rows, the first of which stands in for what is missing."""
        num_needed = self.reach - 1
        rows_RD = rows_RD[len(rows_RD) - min(num_needed, len(rows_RD)) :] if num_needed else rows_RD[:0]
        num_missing = num_needed - len(rows_RD)
        return np.concatenate([np.repeat(rows_RD[:1], num_missing, axis=0), rows_RD]) if num_missing else rows_RD

    def _scaled(self, rows_ND: NDArray[np.generic]) -> Scores:
        """In float64, as the scaler was found: the last digits of a large counter are all that moves in it."""
        scaler = self.manifest.scaler
        with np.errstate(over="ignore", invalid="ignore"):
            z_ND = rows_ND - np.asarray(scaler.centre)
            z_ND /= np.asarray(scaler.scale)
        z_ND[np.isinf(rows_ND)] = np.nan
        np.clip(z_ND, -MAX_SCALED, MAX_SCALED, out=z_ND)
        scaled_ND: Scores = z_ND.astype(np.float32, order="C")  # windows are views: a table's columns may lie otherwise
        return scaled_ND


def load_model(path: str | PathLike[str]) -> Detector:
    """The version in a directory: a model's own (with `current` in it), one version's, or what a known path leads to.

    Raises HostError no_model and host_io.
    """
    manifest, _, scorer = read_version(path)
    return Detector(manifest, scorer)


def read_version(path: str | PathLike[str]) -> tuple[Manifest, TelemetryAutoencoder, Scorer]:
    """What `load_model` finds there, with the network as it was published.

    `current` is resolved once, so that all that is read is of one version. Raises HostError no_model and host_io.
    """
    directory = _version_dir(Path(path))
    try:
        manifest = typed_json.decode((directory / "manifest.json").read_bytes(), Manifest)
        digests = {one.name: one.sha256 for one in manifest.siblings if one.name == SCORER_NAME}
        digests["weights.pt"] = manifest.weights_sha256
        data = {name: (directory / name).read_bytes() for name in digests}
    except OSError as error:
        raise HostError("no_model", f"no model in {path}: {error.strerror}", remedy=REMEDY) from error
    except typed_json.Malformed as error:
        raise HostError("host_io", f"{directory}/manifest.json is damaged: {error}", remedy="publish again") from error
    if SCORER_NAME not in data:
        message = f"version {manifest.version} is of an earlier release, without {SCORER_NAME}"
        raise HostError("no_model", message, remedy="train it anew")
    for name, expected in digests.items():  # torch does not check the archive's checksums: these come first
        if (found := hashlib.sha256(data[name]).hexdigest()) != expected:
            message = f"{directory}/{name} is {found}, not what was published"
            raise HostError("host_io", message, remedy="check the disk, train anew")
    network = _network(data["weights.pt"], manifest.shape.input_dim, f"{directory}/weights.pt")
    name = f"{directory}/{SCORER_NAME}"
    scorer = load(data[SCORER_NAME], network, manifest.shape.window, torch.device("cpu"), name)
    num_metrics, scaler = len(manifest.metric_names), manifest.scaler
    widths = {num_metrics, len(scaler.centre), len(scaler.scale), *(len(path.usual_D) for path in scorer.paths)}
    if len(widths) > 1 or manifest.shape.input_dim != num_metrics * manifest.shape.window:
        message = f"{directory} does not fit together: it is not of one width, but of {sorted(widths)} metrics"
        raise HostError("host_io", message, remedy="publish again")
    return manifest, network, scorer


def _network(data: bytes, input_dim: int, name: str) -> TelemetryAutoencoder:
    """The bytes are those that were published, but whoever published them may not have been this service."""
    try:
        network = build(input_dim, seed=0)
        network.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), strict=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, AttributeError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise HostError("host_io", f"{name} can not be used: {first_line:.200}", remedy="publish again") from error
    return network


@contextmanager
def _one_thread() -> Iterator[None]:
    """A block is too small to share: on a loaded machine, waiting for a second thread made it ten times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _version_dir(path: Path) -> Path:
    if (path / "current").is_symlink():
        path /= "current"
    path = path.resolve()
    return path.parent if path.is_file() else path
