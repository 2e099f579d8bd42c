"""`retraind models`: the versions that were published, which one is live, and the operator's say in it.

Reads here, writes through the publisher alone, under its lock. A running service notices a rollback within seconds,
says so and lets it be. Raises UsageError for a version that is not there, PublishError when the machine fails.
"""

from datetime import UTC, datetime

from retraind import typed_json
from retraind.commands import screen
from retraind.commands.version import show
from retraind.config import Config
from retraind.errors import UsageError
from retraind.supervisor import history as past
from retraind.supervisor import versions
from retraind.supervisor.history import History, sequence_of
from retraind.supervisor.publish import WAIT_SECONDS, Publisher

# As sysexits.h has it for data that are not what they should be.
EXIT_DAMAGED = 65


def models(config: Config, action: str, version: str | None, *, every: bool, as_json: bool) -> int:
    """One action on one version, the live one, or all. Raises UsageError for what does not fit together."""
    publisher = Publisher(config.models.dir, config.models.name, WAIT_SECONDS)
    if every and (action != "verify" or version):
        raise UsageError("bad_argument", "--all is for `retraind models verify` without a version")
    now = datetime.now(UTC)
    match action:
        case "list" if version is None:
            return _list(publisher, as_json=as_json)
        case "show" if version is not None:
            return _show(publisher, _named(publisher, version), as_json=as_json)
        case "verify":
            return _verify(publisher, _chosen(publisher, version, every=every), as_json=as_json)
        case "rollback" | "promote" if version is not None or action == "rollback":
            target = "" if version is None else _named(publisher, version)
            switch = publisher.rollback if action == "rollback" else publisher.promote
            before, live = switch(target, now, config.publish.sign)
            _say({"live": live, "before": before}, f"{live} is live, before {before or 'none'}", as_json=as_json)
        case "pin" | "unpin" if version is not None:
            name = _pinned(publisher, version) if action == "unpin" else _named(publisher, version)
            changed = publisher.pin(name, now, on=action == "pin")
            words = f"{name} is {'pinned' if action == 'pin' else 'not pinned'}" + ("" if changed else " already")
            _say({"version": name, "pinned": action == "pin", "changed": changed}, words, as_json=as_json)
        case _:
            expected = "takes no version" if action == "list" else "needs a version"
            raise UsageError("bad_argument", f"`retraind models {action}` {expected}")
    return 0


def _say(value: dict[str, object], text: str, *, as_json: bool) -> None:
    if as_json:
        screen.print_json(value)
    else:
        screen.print_line(text)


def _matching(names: list[str], text: str) -> str | None:
    """A version by its name or by its number."""
    return next((one for one in names if one == text or (text.isdecimal() and sequence_of(one) == int(text))), None)


def _named(publisher: Publisher, text: str) -> str:
    found = _matching([path.name for path in versions.version_dirs(publisher.home)], text)
    if found is None:
        message = f"{publisher.versions_dir} has no version {text}"
        raise UsageError("not_found", message, remedy="`retraind models` lists them")
    return found


def _pinned(publisher: Publisher, text: str) -> str:
    """A pin outlives a version that was removed by hand."""
    return _matching(_history(publisher).pinned, text) or _named(publisher, text)


def _chosen(publisher: Publisher, version: str | None, *, every: bool) -> list[str]:
    if every:
        return [path.name for path in versions.version_dirs(publisher.home)]
    live = publisher.live_version()
    if version is None and not live:
        raise UsageError("not_found", f"nothing is published below {publisher.models_dir}")
    return [live if version is None else _named(publisher, version)]


def _history(publisher: Publisher) -> History:
    """For display: a damaged one is the publisher's to mend."""
    try:
        return versions.read_history(publisher.home)
    except (OSError, typed_json.Malformed):
        return History()


def _list(publisher: Publisher, *, as_json: bool) -> int:
    live, found = publisher.live_version(), versions.list_versions(publisher.home)
    history = _history(publisher)
    if as_json:
        waiting = past.waiting(history, [manifest.version for manifest in found])
        facts = {
            "live": live or None, "path": str(publisher.link), "pinned": history.pinned, "waiting": waiting,
            "versions": found,
        }  # fmt: skip
        screen.print_json(facts)
    elif not found:
        screen.print_line(f"nothing published yet below {publisher.models_dir}")
    else:
        screen.print_table(
            ("VERSION", "", "PUBLISHED", "DATASET", "ROWS", "METRICS", "LOSS", "MEAN'S LOSS", "PCA'S LOSS"),
            [
                (
                    manifest.version,
                    _mark(manifest.version, live, history),
                    f"{manifest.published_at:%Y-%m-%d %H:%M:%S}Z",
                    manifest.dataset.name,
                    manifest.dataset.num_rows,
                    len(manifest.metric_names),
                    f"{manifest.evaluation.heldout_loss:.4g}",
                    f"{manifest.evaluation.mean_loss:.4g}",
                    "" if manifest.evaluation.pca_loss is None else f"{manifest.evaluation.pca_loss:.4g}",
                )
                for manifest in found
            ],
        )
    return 0


def _mark(version: str, live: str, history: History) -> str:
    marks = {
        "live": version == live, "waits": bool(past.waiting(history, [version])), "pinned": version in history.pinned,
    }  # fmt: skip
    return ", ".join(mark for mark, holds in marks.items() if holds)


def _show(publisher: Publisher, version: str, *, as_json: bool) -> int:
    directory = publisher.versions_dir / version
    manifest = versions.read_manifest(directory)
    if manifest is None:
        screen.complain(f"{directory}: manifest.json is missing or damaged")
        return EXIT_DAMAGED
    if as_json:
        screen.print_json(manifest)
    else:
        show(manifest, directory, _mark(version, publisher.live_version(), _history(publisher)))
    return 0


def _verify(publisher: Publisher, chosen: list[str], *, as_json: bool) -> int:
    found = {version: versions.damage(publisher.versions_dir / version) for version in chosen}
    links = _broken_link(publisher)
    if as_json:
        verdicts = [{"version": name, "ok": not problem, "problem": problem} for name, problem in found.items()]
        screen.print_json({"versions": verdicts, "link": {"ok": not links, "problem": links}})
    else:
        rows = [
            (name, "fail" if problem else "pass", problem or "sha256 as published") for name, problem in found.items()
        ]
        link = ("link", "fail" if links else "pass", links or f"{publisher.link} leads to {publisher.live_version()}")
        screen.print_table(("VERSION", "STATUS", "FOUND"), [*rows, link] if rows or links else [link])
    return EXIT_DAMAGED if links or any(found.values()) else 0


def _broken_link(publisher: Publisher) -> str:
    """What is wrong with the path that consumers know, in words."""
    live = publisher.live_version()
    if not live:
        return f"{publisher.current} leads to no version"
    expected = publisher.versions_dir.resolve() / live / "weights.pt"
    if not publisher.link.is_symlink() or publisher.link.resolve() != expected:
        return f"{publisher.link} does not lead to {expected}"
    return "" if expected.is_file() else f"{expected} is missing"
