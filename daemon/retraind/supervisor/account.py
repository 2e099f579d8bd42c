"""What a version is, in words and figures for people: the same for its page and for `retraind models show`.

Owns how a number is written, what is said of facts that are missing, and the order of things. Pure: no I/O, no clock,
no markup; text from data comes out on one line and clipped, and whoever prints it escapes it. Raises nothing, whatever
the facts are: a version of an older release has few of them.
"""

import math
from collections.abc import Iterable
from itertools import groupby

from retraind.printable import printable
from retraind.report import Check, Dataset, Evaluation, Gpu, Manifest, ScoredRow
from retraind.supervisor.drift import has_drifted, told

Pairs = list[tuple[str, str]]
BETTER, WORSE, OPEN = "better", "worse", "open"
# Characters that are shown of a name, since a header may hold a megabyte, and of a sentence.
_LONGEST, _LONGEST_SENTENCE = 120, 600
# What is said in the place of facts that a version does not have.
NO_SCORES = "No scores of held-out rows are known: none were held out, or the version is of an older release."
NO_ROWS = "No single rows are known: none were held out, or the version is of an older release."
NO_METRIC_ERRORS = "The errors of single metrics are not known: the version is of an older release."
NO_GATE = "What the gate looked at is not known: the version is of an older release."
NO_CHECKS = "What the checks before the training found is not known: the version is of an older release."


def number(value: float | None) -> str:
    """Three figures: 0.0123, 12.3, 12,345, 1.23e-7."""
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    size = abs(value)
    if 999.5 <= size < 1e7:
        return f"{value:,.0f}"
    if value == 0 or 1e-4 <= size < 1e7:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if not 0 <= seconds < 1e9:
        return number(seconds) + " s"
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Text from data on one line, and not longer than somebody reads."""
    shown = printable(text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def sentence(text: str) -> str:
    """What a worker or the gate said, on one line."""
    return clipped(text, _LONGEST_SENTENCE)


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names in a row; what is beyond `most` is counted."""
    every = list(names)
    rest = [f"{len(every) - most:,} more"] if len(every) > most else []
    return ", ".join([*map(clipped, every[:most]), *rest]) or "none"


def moment(manifest: Manifest) -> str:
    return f"{manifest.published_at:%Y-%m-%d %H:%M:%S} UTC"


def headline(manifest: Manifest) -> str:
    """What was published, from what, when."""
    dataset = manifest.dataset
    return (
        f"Published {moment(manifest)} from {clipped(dataset.name)}: {dataset.num_rows:,} rows of "
        f"{len(manifest.metric_names):,} metrics."
    )


def verdicts(manifest: Manifest) -> list[tuple[str, str]]:
    """Whether it is better than the mean, than principal components, than the version before: BETTER, WORSE, OPEN.

    And whether its data is unlike what the version before knew.
    """
    evaluation = manifest.evaluation
    found = [_against("predicting each metric's mean", evaluation.mean_loss, evaluation)]
    if evaluation.pca_loss is None:
        found.append((OPEN, "Principal components were not measured beside it."))
    else:
        what = f"{manifest.shape.latent_dim} principal components"
        found.append(_against(what, evaluation.pca_loss, evaluation))
    found.append(_against_published(manifest))
    drift = evaluation.drift
    if drift is not None and has_drifted(drift):
        found.append((WORSE, sentence(f"The data has drifted, or a fault lasts in it: {told(drift)}.")))
    return found


def _against(what: str, theirs: float, evaluation: Evaluation) -> tuple[str, str]:
    ours = evaluation.heldout_loss
    rows = "held-out rows" if evaluation.num_heldout_rows else "rows that it learned from (none were held out)"
    figures = f"mean error {number(ours)} against {number(theirs)}, on the {rows}"
    return _verdict(what, ours, theirs, figures)


def _against_published(manifest: Manifest) -> tuple[str, str]:
    comparison = manifest.evaluation.comparison
    if comparison is not None:
        ours, theirs = comparison.candidate_error, comparison.published_error
        rows = f"the same {comparison.num_rows:,} held-out rows, in the same units"
        figures = f"mean error {number(ours)} against {number(theirs)}, on {rows}"
        return _verdict(f"version {clipped(comparison.version)}, which was published", ours, theirs, figures)
    if manifest.evaluation.no_comparison:
        return OPEN, sentence(f"Not measured beside the model that was live: {manifest.evaluation.no_comparison}")
    if manifest.replaces:
        return OPEN, f"It was not measured on the same rows as version {manifest.replaces}, which was live before."
    return OPEN, "No version that was live before is known: there is none to compare it with."


def _verdict(what: str, ours: float, theirs: float, figures: str) -> tuple[str, str]:
    if not (math.isfinite(ours) and math.isfinite(theirs)) or ours == theirs:
        return OPEN, f"Neither better nor worse than {what}: {figures}."
    kind = BETTER if ours < theirs else WORSE
    change = abs(ours - theirs) / abs(theirs) if theirs else math.inf
    by = f" ({100 * change:.3g} % {'lower' if ours < theirs else 'higher'})" if change < 10 else ""
    return kind, f"{kind.capitalize()} than {what}: {figures}{by}."


def identity(manifest: Manifest) -> Pairs:
    """Names and digests."""
    return [
        ("version", manifest.version),
        ("model", clipped(manifest.model_name)),
        ("published", f"{moment(manifest)} by job {clipped(manifest.job)}"),
        ("replaces", manifest.replaces or "no version that is known"),
        ("weights", f"{manifest.weights_bytes:,} bytes, sha256 {manifest.weights_sha256}"),
        *((f"file {file.name}", f"{file.num_bytes:,} bytes, sha256 {file.sha256}") for file in manifest.siblings),
    ]


def data(manifest: Manifest) -> Pairs:
    """What it was learned from, and what of that was not used."""
    dataset = manifest.dataset
    dropped = [f"{clipped(reason)} {amount:,}" for reason, amount in dataset.num_dropped.items() if amount]
    ignored = [f"{column.name} ({column.reason})" for column in dataset.ignored_columns]
    return [
        ("dataset", f"{clipped(dataset.name)}, {dataset.num_bytes:,} bytes"),
        ("sha256", dataset.sha256),
        ("format", clipped(dataset.format)),
        ("rows", f"{dataset.num_rows:,} used, {sum(dataset.num_dropped.values()):,} dropped"),
        ("dropped", listed(dropped)),
        ("missing cells", _missing(dataset)),
        *([("drift", sentence(told(manifest.evaluation.drift)))] if manifest.evaluation.drift else []),
        ("ignored columns", listed(ignored)),
        ("constant metrics", listed(dataset.constant_metrics)),
        ("rates per second", listed(dataset.rate_metrics)),
        ("metrics", f"{len(manifest.metric_names):,}: {listed(manifest.metric_names)}"),
    ]


def _missing(dataset: Dataset) -> str:
    most = [f"{found.num_cells:,} of {found.name}" for found in dataset.most_missing]
    count = f"{dataset.num_missing_cells:,} of {dataset.num_rows * len(dataset.metric_names):,}"
    return f"{count}: {listed(most)}" if most else count


def training(manifest: Manifest) -> Pairs:
    """How long it took, on what, and with which settings."""
    report, shape = manifest.training, manifest.shape
    widths = (shape.input_dim, shape.hidden_dim, shape.latent_dim, shape.hidden_dim, shape.input_dim)
    return [
        ("time", f"{duration(report.seconds)}, {number(report.rows_per_second)} rows a second"),
        ("device", f"{clipped(report.device_name)} ({clipped(report.device)}), {clipped(report.precision)}"),
        ("network", " - ".join(f"{width:,}" for width in widths)),
        ("epochs", f"{report.epochs:,} of batches of {report.batch_size:,}, seed {report.seed}"),
        ("first weights", _first_weights(manifest)),
        ("steps", f"{report.num_steps:,}, {report.num_skipped_steps:,} skipped, resumed {report.num_resumes:,} times"),
        ("software", ", ".join(f"{clipped(name)} {clipped(text)}" for name, text in manifest.versions.items() if text)),
    ]  # fmt: skip


def _first_weights(manifest: Manifest) -> str:
    report = manifest.training
    if report.warm_start:
        return f"those of version {clipped(report.warm_start)}, which was live"
    return sentence(f"drawn: {report.no_warm_start}" if report.no_warm_start else "drawn")


def errors(manifest: Manifest) -> Pairs:
    """What it reached."""
    evaluation, threshold = manifest.evaluation, manifest.evaluation.threshold
    found = [
        ("held-out rows", f"{evaluation.num_heldout_rows:,}"),
        ("this model", number(evaluation.heldout_loss)),
        ("each metric's mean", number(evaluation.mean_loss)),
        ("principal components", number(evaluation.pca_loss)),
    ]
    if threshold is None:
        return [*found, ("threshold", number(manifest.threshold) if manifest.threshold is not None else "none")]
    share = f"{100 * threshold.expected_share:.3g} % of normal rows are expected above it"
    return [
        *found,
        ("threshold", f"{number(threshold.value)}: {share}, {100 * threshold.target_share:.3g} % asked for"),
    ]


def criteria(manifest: Manifest) -> list[tuple[str, str, str]]:
    """What the gate looked at: code, pass or fail, the figures in words."""
    return [(clipped(one.code), "pass" if one.passed else "fail", sentence(one.message)) for one in manifest.gate]


def checks(manifest: Manifest) -> list[tuple[str, str, str]]:
    """What the preflight found: name, status, message with its remedy."""
    return [
        (clipped(one.name), clipped(one.status), sentence("; ".join(filter(None, (one.message, one.remedy)))))
        for one in folded(manifest.checks)
    ]


def folded(found: Iterable[Check]) -> list[Check]:
    """Neighbours that are all skipped for one reason as one: without a GPU they are eighteen, and nobody reads on."""
    shown: list[Check] = []
    for (status, message), group in groupby(found, lambda one: (one.status, one.message)):
        first, *others = group
        if others and status == "skip":
            shown.append(Check(name=f"{first.name} and {len(others)} more", status=status, message=message))
        else:
            shown += [first, *others]
    return shown


def marked_gpus(gpus: Iterable[Gpu]) -> Pairs:
    """Each GPU with its figures, the one that a job would have marked by a star."""
    return [(f"GPU {gpu.index}{' *' if gpu.is_chosen else ''}", describe_gpu(gpu)) for gpu in gpus]


def describe_gpu(gpu: Gpu) -> str:
    """Its figures in one line; what the driver did not tell is left out."""
    gib = 2**30
    has_memory = gpu.memory_free_bytes is not None and gpu.memory_total_bytes is not None
    parts = [
        clipped(gpu.name),
        clipped(gpu.uuid),
        clipped(gpu.pci_address),
        gpu.driver_version and f"driver {clipped(gpu.driver_version)}",
        gpu.kernel_module and f"kernel module {clipped(gpu.kernel_module)}",
        f"{(gpu.memory_free_bytes or 0) / gib:.1f} of {(gpu.memory_total_bytes or 0) / gib:.1f} GiB free" * has_memory,
        "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} C",
        "" if gpu.pstate is None else f"P{gpu.pstate}",
        "" if gpu.pcie_generation is None else _link("PCIe gen", gpu.pcie_generation, gpu.pcie_max_generation),
        "" if gpu.pcie_width is None else _link("width", gpu.pcie_width, gpu.pcie_max_width),
    ]
    return ", ".join(part for part in parts if part)


def _link(what: str, now: int, greatest: int | None) -> str:
    return f"{what} {now}" + ("" if greatest is None else f" of {greatest}")


def gpus(manifest: Manifest) -> Pairs:
    """The GPUs that the preflight found, the one that was used marked."""
    return [(f"GPU {gpu.index}" + " (chosen)" * gpu.is_chosen, describe_gpu(gpu)) for gpu in manifest.gpus]


def worst_rows(manifest: Manifest) -> list[ScoredRow]:
    """The rows with the highest scores, the highest first."""
    return sorted(manifest.evaluation.worst_rows, key=lambda row: -row.score)


def metric_errors(manifest: Manifest) -> list[tuple[str, float]]:
    """Each metric's error on the held-out rows, the worst first."""
    found = zip(manifest.metric_names, manifest.evaluation.metric_errors, strict=False)
    return sorted(((clipped(name), error) for name, error in found), key=lambda pair: -pair[1])


def blame(row: ScoredRow) -> list[str]:
    """The metrics that make up a row's score."""
    return [
        f"{clipped(one.name)} {number(100 * one.share)} % (z {'+' * (one.z > 0)}{number(one.z)})" for one in row.metrics
    ]


def beside(manifest: Manifest, before: Manifest) -> list[tuple[str, str, str]]:
    """The same facts of two versions."""
    facts = [_comparable(one) for one in (manifest, before)]
    return [(name, this, that) for (name, this), (_, that) in zip(*facts, strict=True)]


def _comparable(manifest: Manifest) -> Pairs:
    evaluation, report, dataset = manifest.evaluation, manifest.training, manifest.dataset
    return [
        ("version", manifest.version),
        ("published", moment(manifest)),
        ("dataset", clipped(dataset.name)),
        ("rows", f"{dataset.num_rows:,}"),
        ("rows dropped", f"{sum(dataset.num_dropped.values()):,}"),
        ("metrics", f"{len(manifest.metric_names):,}"),
        ("held-out rows", f"{evaluation.num_heldout_rows:,}"),
        ("mean error, each on its own rows", number(evaluation.heldout_loss)),
        ("each metric's mean, on those", number(evaluation.mean_loss)),
        ("principal components, on those", number(evaluation.pca_loss)),
        ("threshold", "none" if manifest.threshold is None else number(manifest.threshold)),
        ("epochs", f"{report.epochs:,}"),
        ("training", f"{duration(report.seconds)} on {clipped(report.device)}"),
    ]


def other_metrics(manifest: Manifest, before: Manifest) -> str:
    """How the metrics of two versions differ."""
    now, then = set(manifest.metric_names), set(before.metric_names)
    if now == then:
        return "Both have the same metrics."
    return f"New metrics: {listed(sorted(now - then))}. No longer there: {listed(sorted(then - now))}."
