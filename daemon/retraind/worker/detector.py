"""A published version as what it is for: rows of raw values to errors by metric, z-scores and anomaly scores.

Owns how a version is found, checked and loaded, and the arithmetic of a score; `retraind.load_model` is this one. Never
trains, never writes, never reads a dataset, and leaves torch's settings as they were. Raises HostError no_model where
there is none that can score, host_io where its bytes are not those that were published; ValueError for a wrong array.
"""

# N rows, B rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from retraind import typed_json
from retraind.errors import HostError
from retraind.report import Manifest
from retraind.worker.model import TelemetryAutoencoder, build

# The values of a block of float64 stay in a core's cache (1 MiB) through every step that is taken with them.
BLOCK_VALUES = 2**17
# A value so many deviations away is as strange as one can be, and the squares of a row still add up in float32.
MAX_SCALED = 1e15
REMEDY = "publish one first: drop a file into the spool, or run `retraind train`"

Scores = NDArray[np.float32]


class Detector:
    """One published version, whole and checked. Scores are independent of how rows are cut into calls."""

    def __init__(self, manifest: Manifest, model: TelemetryAutoencoder) -> None:
        if manifest.threshold is None:
            raise HostError(
                "no_model", f"version {manifest.version} has no threshold to score by", remedy="train it anew"
            )
        self.manifest = manifest
        self.version = manifest.version
        self.metric_names = list(manifest.metric_names)
        self.threshold = manifest.threshold
        self._centre_D = torch.tensor(manifest.scaler.centre, dtype=torch.float64)
        self._scale_D = torch.tensor(manifest.scaler.scale, dtype=torch.float64)
        self._network = _without_batchnorm(model)

    def score(self, rows_ND: ArrayLike) -> Scores:
        """One number a row, shape (N,): above 1 is anomalous. NaN for a row with a value that is not finite.

        Takes raw values, shape (N, D), in the order of metric_names. Raises ValueError for any other shape.
        """
        rows_ND = self._checked(rows_ND)
        scores_N = np.empty(len(rows_ND), np.float32)
        with _one_thread():
            for start, _, errors_BD in self._blocks(rows_ND):
                scores_N[start : start + len(errors_BD)] = (errors_BD.mean(dim=1) / self.threshold).numpy()
        return scores_N

    def errors(self, rows_ND: ArrayLike) -> Scores:
        """The squared error of each metric in units of its variance, shape (N, D); a row's mean over it is its error.

        A row with a value that is not finite is NaN throughout. Raises ValueError as `score` does.
        """
        return self.explain(rows_ND)[0]

    def explain(self, rows_ND: ArrayLike) -> tuple[Scores, Scores]:
        """What `errors` gives, and beside it the z-scores: each value's distance from its metric's mean, (N, D)."""
        rows_ND = self._checked(rows_ND)
        errors_ND, z_ND = np.empty(rows_ND.shape, np.float32), np.empty(rows_ND.shape, np.float32)
        with _one_thread():
            for start, x_BD, errors_BD in self._blocks(rows_ND):
                z_ND[start : start + len(x_BD)] = x_BD.numpy()
                errors_ND[start : start + len(x_BD)] = errors_BD.numpy()
        return errors_ND, z_ND

    def _checked(self, rows_ND: ArrayLike) -> NDArray[np.generic]:
        array = np.asarray(rows_ND)
        if array.ndim != 2 or array.shape[1] != len(self.metric_names):
            raise ValueError(f"rows of shape {array.shape}: (rows, {len(self.metric_names)}) is expected")
        if array.dtype.kind not in "fiu":
            raise ValueError(f"rows of type {array.dtype}: numbers are expected")
        return array

    @torch.no_grad()
    def _blocks(self, rows_ND: NDArray[np.generic]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Where a block begins, its scaled values and their squared errors, (B, D) each."""
        step = max(1, BLOCK_VALUES // len(self.metric_names))
        for start in range(0, len(rows_ND), step):
            # In float64, as the scaler was found: the last digits of a large counter are all that moves in it.
            raw_BD = torch.from_numpy(rows_ND[start : start + step].astype(np.float64))
            x_BD = raw_BD.sub_(self._centre_D).div_(self._scale_D)
            unusable_B = ~torch.isfinite(x_BD.sum(dim=1))  # a sum is as little finite as its parts, and cheaper to ask
            x_BD = x_BD.clamp_(-MAX_SCALED, MAX_SCALED).float()
            x_BD[unusable_B] = torch.nan
            errors_BD: Tensor = self._network(x_BD)
            yield start, x_BD, errors_BD.sub_(x_BD).square_()


def load_model(path: str | PathLike[str]) -> Detector:
    """The version in a directory: a model's own (with `current` in it), one version's, or what a known path leads to.

    `current` is resolved once, so that all that is read is of one version. Raises HostError no_model and host_io.
    """
    directory = _version_dir(Path(path))
    try:
        manifest = typed_json.decode((directory / "manifest.json").read_bytes(), Manifest)
        data = (directory / "weights.pt").read_bytes()
    except OSError as error:
        raise HostError("no_model", f"no model in {path}: {error.strerror}", remedy=REMEDY) from error
    except typed_json.Malformed as error:
        raise HostError("host_io", f"{directory}/manifest.json is damaged: {error}", remedy="publish again") from error
    # torch does not check the archive's checksums: the digest is compared first.
    if (found := hashlib.sha256(data).hexdigest()) != manifest.weights_sha256:
        raise HostError(
            "host_io", f"{directory}/weights.pt is {found}, not what was published", remedy="check the disk, train anew"
        )
    model = build(manifest.shape.input_dim, seed=0)
    model.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True), strict=True)
    return Detector(manifest, model.eval())


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


def _without_batchnorm(model: TelemetryAutoencoder) -> nn.Sequential:
    """The same function in evaluation mode with half the passes over memory: BatchNorm is folded into its layer.

    The activations overwrite what they are given.
    """
    layers: list[nn.Module] = []
    for half in (model.encoder, model.decoder):
        for layer in half:
            if isinstance(layer, nn.BatchNorm1d):
                layers[-1] = fuse_linear_bn_eval(cast("nn.Linear", layers[-1]), layer)
            elif isinstance(layer, nn.LeakyReLU):
                layers.append(nn.LeakyReLU(layer.negative_slope, inplace=True))
            else:
                layers.append(layer)
    return nn.Sequential(*layers).eval()
