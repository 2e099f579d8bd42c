"""What is told of the live version, and of new data by the one that was live: its gauges, and what moves them.

A part of metrics.py. All numbers of a version change in one step, so that no scrape pairs those of two.
"""

from retraind.report import Drift, Manifest
from retraind.supervisor.drift import alarm_share
from retraind.supervisor.series import Registry, bounded

DEVICES = ("cpu", "cuda")


class ModelMetrics:
    """Absent until there is a version, and a dataset that it could score."""

    def __init__(self, make: Registry) -> None:
        self._drift = make.optional(
            "drift",
            {
                "alarm_share": "Share of the last dataset's rows above the threshold of the version that was live.",
                "expected_share": "Share of normal rows that was expected above that threshold.",
                "rows": "Rows of the last dataset that were scored for it; absent where no version could score them.",
            },
        )
        self._info = make.changing("model_info", "The live version.", "version")
        self._model_device = make.changing(
            "model_device", "1 for the device on which the live version was trained.", "device"
        )
        self._live = make.optional(
            "model",
            {
                "heldout_loss": "Held-out loss of the live version.",
                "mean_loss": "Loss of predicting each metric's mean on the same held-out rows.",
                "pca_loss": "Loss of as many principal components on the same rows.",
                "rows": "Rows that the live version was trained on.",
                "metrics": "Metrics that the live version takes.",
                "last_publish_timestamp_seconds": "When the live version was published.",
            },
        )

    def published(self, manifest: Manifest) -> None:
        """The live version, now or found at the start."""
        self._info.values = {(manifest.version,): 1}
        trained_on = manifest.training.device.partition(":")[0]
        self._model_device.values = {(device,): float(device == trained_on) for device in DEVICES}
        values = {
            "heldout_loss": manifest.evaluation.heldout_loss,
            "mean_loss": manifest.evaluation.mean_loss,
            "rows": bounded(manifest.dataset.num_rows),
            "metrics": len(manifest.metric_names),
            "last_publish_timestamp_seconds": manifest.published_at.timestamp(),
        }
        if manifest.evaluation.pca_loss is not None:
            values["pca_loss"] = manifest.evaluation.pca_loss
        self._live.values = values

    def drift_seen(self, drift: Drift | None) -> None:
        """What the version that was live said of the rows of the last dataset; None where it could not be asked."""
        if drift is None:
            self._drift.values = {}
            return
        self._drift.values = {
            "alarm_share": bounded(alarm_share(drift)),
            "expected_share": bounded(drift.expected_share),
            "rows": bounded(drift.num_rows),
        }
