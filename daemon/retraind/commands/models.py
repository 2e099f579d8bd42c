"""`retraind models`: the versions that were published, and which one is live."""

from retraind.commands import screen
from retraind.config import Config
from retraind.supervisor.publish import Publisher, list_versions


def models(config: Config, *, as_json: bool) -> int:
    """Lists every version of the model, the live one marked."""
    publisher = Publisher(config.models.dir, config.models.name)
    live = publisher.live_version()
    versions = list_versions(publisher.home)
    if as_json:
        screen.print_json({"live": live or None, "path": str(publisher.link), "versions": versions})
    elif not versions:
        screen.print_line(f"nothing published yet below {publisher.models_dir}")
    else:
        screen.print_table(
            ("VERSION", "", "PUBLISHED", "DATASET", "ROWS", "METRICS", "LOSS", "MEAN'S LOSS"),
            [
                (
                    manifest.version,
                    "live" if manifest.version == live else "",
                    f"{manifest.published_at:%Y-%m-%d %H:%M:%S}Z",
                    manifest.dataset.name,
                    manifest.dataset.num_rows,
                    len(manifest.metric_names),
                    f"{manifest.evaluation.heldout_loss:.4g}",
                    f"{manifest.evaluation.mean_loss:.4g}",
                )
                for manifest in versions
            ],
        )
    return 0
