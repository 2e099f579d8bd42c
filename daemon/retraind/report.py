"""What a worker finds out and what a model carries with it: dataset, training, evaluation, candidate, manifest.

Plain typed facts that cross the process border as JSON and end in a version's manifest. No I/O, no clock.
"""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from retraind.column_rules import ColumnRules

# Problems of single rows that a report lists in full; beyond that they are only counted.
MAX_PROBLEMS = 20
MAX_MOST_MISSING = 20


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything here."""


class Check(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """One preflight check: a name of events.CHECKS, a status of events.CHECK_STATUSES."""

    name: str
    status: str
    message: str
    remedy: str = ""


class Gpu(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU as the preflight found it. What the driver does not tell is None or empty; `is_chosen`: the job's own."""

    index: int
    uuid: str = ""
    name: str = ""
    pci_address: str = ""
    driver_version: str = ""
    kernel_module: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    temperature_celsius: int | None = None
    pstate: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    is_chosen: bool = False


class IgnoredColumn(Fact, frozen=True, kw_only=True):
    """A column that is not used as a metric, and why.

    By what it holds: not_numeric, empty. By its name: time, label, identity. By the configuration: excluded,
    not_included. And `extra`: the metrics were given by a first file, or by the published model.
    """

    name: str
    reason: str


class Problem(Fact, frozen=True, kw_only=True):
    """One row or cell that could not be used. Line and column count from 1; `reason` is a key of num_dropped."""

    line: int
    reason: str
    column: int | None = None
    text: str = ""


class MissingCells(Fact, frozen=True, kw_only=True):
    """In how many of the used rows a metric has no value."""

    name: str
    num_cells: int


class Dataset(Fact, frozen=True, kw_only=True):
    """What was understood of a dataset. `num_rows` counts the rows that are used, of which some cells may be missing.

    `num_missing_cells` counts those, the `num_non_finite_cells` that were infinite or beyond float32 among them.
    """

    name: str
    sha256: str
    num_bytes: int
    format: str
    num_rows: int
    num_dropped: dict[str, int]
    metric_names: list[str]
    ignored_columns: list[IgnoredColumn]
    constant_metrics: list[str] = []
    problems: list[Problem] = []
    num_missing_cells: int = 0
    num_non_finite_cells: int = 0
    most_missing: list[MissingCells] = []  # the metrics that lack most, the worst first, at most MAX_MOST_MISSING
    rules: ColumnRules = ColumnRules()  # by which its metrics were chosen
    rate_metrics: list[str] = []  # counters: their values, and the scaler's, are rates per second
    held_to: str = ""  # the version whose list of metrics it was held to; empty where it decided by itself


class Scaler(Fact, frozen=True, kw_only=True):
    """Centre and scale per metric, in the order of metric_names: scaled = (raw - centre) / scale, in float64.

    A constant metric has scale 1.0 and its scaled values are 0 in the data it was learned from. The model is given
    values beyond `soft_limit` as sign(scaled) x soft_limit x (1 + ln(|scaled| / soft_limit)); None: as they are.
    """

    centre: list[float]
    scale: list[float]
    soft_limit: float | None = None


class TrainingReport(Fact, frozen=True, kw_only=True):
    """How the weights came about. Losses are means over rows and metrics of the squared error of scaled values."""

    epochs: int
    batch_size: int
    num_steps: int
    epoch_losses: list[float]
    seconds: float
    rows_per_second: float
    device: str
    device_name: str
    precision: str
    seed: int
    heldout_losses: list[float] = []  # after each epoch, of the held-out rows; empty without such rows
    num_skipped_steps: int = 0
    warm_start: str = ""  # the version whose weights were the first ones; empty: they were drawn
    no_warm_start: str = ""  # why not, in words, where that was asked for
    num_resumes: int = 0  # how often it went on from a checkpoint; `seconds` are of training alone, over all attempts


class Threshold(Fact, frozen=True, kw_only=True):
    """The error of a row, mean over its metrics, above which it is anomalous.

    `target_share` of normal rows was asked to be above it; `expected_share`, which `num_rows` errors can vouch for, is
    larger where those were few.
    """

    value: float
    target_share: float
    expected_share: float
    num_rows: int


class Histogram(Fact, frozen=True, kw_only=True):
    """How often which score came: `counts[i]` scores from `edges[i]` up to `edges[i + 1]`, the last edge included."""

    edges: list[float]
    counts: list[int]


class ScoreSeries(Fact, frozen=True, kw_only=True):
    """Scores in the order of the rows, thinned: each point is the largest of `rows_per_point` scores."""

    first_row: int  # of the dataset's used rows, from 0
    rows_per_point: int
    maxima: list[float]


class MetricShare(Fact, frozen=True, kw_only=True):
    """A metric's part in a row's error, 0 to 1, and how many deviations its value is from the metric's centre."""

    name: str
    share: float
    z: float


class ScoredRow(Fact, frozen=True, kw_only=True):
    """A row that stands out: its number among the used rows, from 0, its score, the metrics that make it up."""

    row: int
    score: float
    metrics: list[MetricShare]


class Comparison(Fact, frozen=True, kw_only=True):
    """The published model beside the candidate, on the same held-out rows: mean error of either, lower is better.

    The mean square of what each net leaves of a value, in deviations of the candidate's scaler.
    """

    version: str
    published_error: float
    candidate_error: float
    num_rows: int


class Drift(Fact, frozen=True, kw_only=True):
    """How many rows of new data the model that was live calls anomalous, of those that were scored.

    `expected_share` of normal rows was expected above its threshold, when that was found.
    """

    version: str
    num_rows: int
    num_alarms: int
    expected_share: float


class Criterion(Fact, frozen=True, kw_only=True):
    """One thing that the gate looked at, with the figures in words."""

    code: str
    passed: bool
    message: str


class SiblingFile(Fact, frozen=True, kw_only=True):
    """A file that belongs to a version beside weights.pt and manifest.json; a worker's are bounded."""

    name: str
    sha256: str
    num_bytes: int


class Evaluation(Fact, frozen=True, kw_only=True):
    """Held-out error. `mean_loss` is what predicting each metric's mean would reach on the same rows.

    `pca_loss` is what as many principal components as the model has latent numbers reach, None where not measured.
    `num_heldout_rows` is 0 when the dataset was too small to hold rows out; all of it is then of the training rows.
    """

    num_heldout_rows: int
    heldout_loss: float
    mean_loss: float
    pca_loss: float | None = None
    threshold: Threshold | None = None
    metric_errors: list[float] = []  # mean squared error of each metric on these rows, in the order of metric_names
    histogram: Histogram | None = None
    scores: ScoreSeries | None = None
    worst_rows: list[ScoredRow] = []
    comparison: Comparison | None = None
    drift: Drift | None = None
    no_comparison: str = ""  # why there is none, in words


class TensorFact(Fact, frozen=True, kw_only=True):
    """One tensor of a state_dict as it was read back from the candidate's file."""

    name: str
    shape: list[int]
    dtype: str
    is_finite: bool


class ModelShape(Fact, frozen=True, kw_only=True):
    """The architecture: input_dim - 24 - latent_dim - 24 - input_dim, where input_dim is metrics x window.

    A row of input is `window` consecutive rows of metrics, the oldest first.
    """

    input_dim: int
    hidden_dim: int
    latent_dim: int
    window: int = 1


class Candidate(Fact, frozen=True, kw_only=True):
    """A trained model on offer: the facts that the gate judges and the manifest keeps.

    The weights lie beside it as weights.pt; `weights_sha256` is of that file's bytes. `tensors` was read back from
    them, `expected` is what the architecture prescribes. `siblings` lie there too, under their names.
    """

    weights_sha256: str
    weights_bytes: int
    shape: ModelShape
    dataset: Dataset
    scaler: Scaler
    training: TrainingReport
    evaluation: Evaluation
    tensors: list[TensorFact]
    expected: list[TensorFact]
    versions: dict[str, str]
    siblings: list[SiblingFile] = []
    checks: list[Check] = []
    gpus: list[Gpu] = []


class Manifest(Fact, frozen=True, kw_only=True):
    """What lies beside a published weights.pt as manifest.json."""

    version: str
    sequence: int
    model_name: str
    published_at: datetime
    job: str
    weights_sha256: str
    weights_bytes: int
    shape: ModelShape
    metric_names: list[str]
    scaler: Scaler
    threshold: float | None
    dataset: Dataset
    training: TrainingReport
    evaluation: Evaluation
    versions: dict[str, str]
    siblings: list[SiblingFile] = []
    gate: list[Criterion] = []
    checks: list[Check] = []  # what the preflight of its training found
    gpus: list[Gpu] = []
    replaces: str = ""  # the version that was live before; empty for the first, and where that could not be read
    schema: int = 1


def manifest_of(
    candidate: Candidate,
    version: str,
    sequence: int,
    model_name: str,
    job: str,
    now: datetime,
    gate: Sequence[Criterion] = (),
) -> Manifest:
    """The manifest of a candidate that becomes a version."""
    return Manifest(
        version=version,
        sequence=sequence,
        model_name=model_name,
        published_at=now,
        job=job,
        weights_sha256=candidate.weights_sha256,
        weights_bytes=candidate.weights_bytes,
        shape=candidate.shape,
        metric_names=candidate.dataset.metric_names,
        scaler=candidate.scaler,
        threshold=candidate.evaluation.threshold.value if candidate.evaluation.threshold else None,
        dataset=candidate.dataset,
        training=candidate.training,
        evaluation=candidate.evaluation,
        versions=candidate.versions,
        siblings=candidate.siblings,
        checks=candidate.checks,
        gpus=candidate.gpus,
        gate=list(gate),
    )
