"""report.html: the page that a person reads about a version, made of its manifest and that of the version before.

Owns the order of the page and what it says where a fact is missing; sentences and figures are `account`'s, drawings
`page_plots`'s. Pure: no I/O, no clock. The page needs nothing but itself, neither script nor network, and its policy
forbids both; every word that came from data is escaped. Costs milliseconds. Raises nothing, whatever the facts are.
"""

from collections.abc import Iterable, Sequence
from html import escape

from retraind.report import Manifest
from retraind.supervisor import account, page_plots
from retraind.supervisor.account import Pairs, clipped, number
from retraind.supervisor.page_style import CSS

PAGE_NAME = "report.html"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Rows of a table that are seen at once; the others are one click away.
_SHOWN = 15
# And those that the page has at all: ten thousand metrics would be megabytes, made by the thread that owns all state.
_MOST = 2000
_MARKS = {"pass": "&#10003; pass", "fail": "&#10007; fail", "warn": "! warn"}


def render(manifest: Manifest, before: Manifest | None) -> str:
    """The whole page. `before` is the version that was live when this one was published."""
    title = escape(f"{clipped(manifest.model_name)} {clipped(manifest.version)}")
    sections = (
        _section("Training and scores", _plots(manifest)),
        _section("Rows that stand out", _worst_rows(manifest)),
        _section("Error of each metric", _metric_errors(manifest)),
        _section("Compared with the version before", _comparison(manifest, before)),
        _section("Gate", _gate(manifest)),
        _section("Data", _data(manifest)),
        _section("Training", _facts(account.training(manifest), "How the weights came about")),
        _section("Preflight", _preflight(manifest)),
        _section("Version", _facts(account.identity(manifest), "Names and digests")),
        _section("Scaler", _scaler(manifest)),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{CSS}</style></head>\n<body><main>\n"
        f"<h1>{title}</h1>\n{_summary(manifest)}\n{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, inside: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n{inside}\n</section>\n'


def _summary(manifest: Manifest) -> str:
    verdicts = []
    for kind, sentence in account.verdicts(manifest):
        first, space, rest = sentence.partition(" ")
        strong = f"<b>{escape(first)}</b>" if kind != account.OPEN else escape(first)
        verdicts.append(f'<li class="{kind}">{strong}{space}{escape(rest)}</li>')
    return f'<p class="lead">{escape(account.headline(manifest))}</p>\n<ul class="verdicts">{"".join(verdicts)}</ul>'


def _say(sentence: str) -> str:
    return f'<p class="soft">{escape(sentence)}</p>'


def _facts(pairs: Pairs, caption: str) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in pairs)
    return f'<table class="facts"><caption>{escape(caption)}</caption><tbody>{rows}</tbody></table>'


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML; the first of a row is its heading. Rows beyond the first ones are folded away."""
    shown = _rows(caption, heads, rows[:_SHOWN])
    if len(rows) <= _SHOWN:
        return shown
    rest = _rows(f"{caption}, continued", heads, rows[_SHOWN:_MOST])
    if len(rows) > _MOST:
        rest += _say(f"{len(rows) - _MOST:,} more stand in manifest.json.")
    return f"{shown}<details><summary>The other {len(rows) - _SHOWN:,}</summary>{rest}</details>"


def _rows(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(_cell(cell, "td" if index else 'th scope="row"') for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    table = f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">{table}</div>'


def _cell(inside: str, tag: str) -> str:
    """A figure is not broken over lines."""
    if inside.startswith("<td"):
        return inside
    kind = ' class="figure"' if len(inside) < 12 and inside.lstrip("-")[:1].isdecimal() else ""
    return f"<{tag}{kind}>{inside}</{tag[:2]}>"


def _plots(manifest: Manifest) -> str:
    evaluation, training = manifest.evaluation, manifest.training
    return '<div class="plots">' + "".join((
        _figure(
            "Loss by epoch", page_plots.losses(training.epoch_losses, training.heldout_losses),
            "Mean squared error of scaled values; held-out rows were not trained on.",
            f"{training.epochs:,} epochs: too few losses for a curve; the last one is "
            f"{number(training.epoch_losses[-1] if training.epoch_losses else None)}.",
        ),
        _figure(
            "Scores of held-out rows", page_plots.histogram(evaluation.histogram),
            "A row's score is its error divided by the threshold: above 1 it counts as anomalous.", account.NO_SCORES,
        ),
        _figure(
            "Scores over the held-out rows", page_plots.scores(evaluation.scores),
            "In the order of the file. Each point is the largest score of its rows.", account.NO_SCORES,
        ),
        f'<figure><h3>What it reached</h3>{_facts(account.errors(manifest), "Mean errors: lower is better")}</figure>',
    )) + "</div>"  # fmt: skip


def _figure(title: str, svg: str | None, caption: str, otherwise: str) -> str:
    inside = f"{svg}<figcaption>{escape(caption)}</figcaption>" if svg else _say(otherwise)
    return f"<figure><h3>{escape(title)}</h3>{inside}</figure>"


def _worst_rows(manifest: Manifest) -> str:
    rows = account.worst_rows(manifest)
    if not rows:
        return _say(account.NO_ROWS)
    cells = [
        (
            f"{row.row:,}",
            number(row.score),
            "".join(f'<span class="part">{escape(one)}</span> ' for one in account.blame(row)),
        )
        for row in rows
    ]
    caption = (
        "Used rows of the dataset, counted from 0, with the highest scores, and the metrics that make up each; z is "
        "how many deviations a value is from the metric's centre"
    )
    return _table(caption, ("Row", "Score", "Metrics"), cells)


def _metric_errors(manifest: Manifest) -> str:
    found = account.metric_errors(manifest)
    if not found:
        return _say(account.NO_METRIC_ERRORS)
    largest = max(error for _, error in found)
    if not largest > 0:
        return _say(f"The error of each of the {len(found):,} metrics is 0.")
    cells = [
        (
            escape(name),
            number(error),
            f'<td class="bar"><span style="width:{max(0.0, 100 * (error / largest)):.1f}%"></span></td>',
        )
        for name, error in found
    ]
    caption = "Mean squared error of scaled values on the held-out rows, the worst first"
    return _table(caption, ("Metric", "Error", "Share of the worst"), cells)


def _comparison(manifest: Manifest, before: Manifest | None) -> str:
    _, sentence = account.verdicts(manifest)[-1]
    if before is None:
        return _say(sentence)
    rows = [tuple(map(escape, row)) for row in account.beside(manifest, before)]
    table = _table("The two versions beside each other", ("", "This version", "Before"), rows)
    return f"<p>{escape(sentence)}</p>{table}<p>{escape(account.other_metrics(manifest, before))}</p>"


def _gate(manifest: Manifest) -> str:
    if not manifest.gate:
        return _say(account.NO_GATE)
    num_passed = sum(criterion.passed for criterion in manifest.gate)
    decision = f"Published: {num_passed:,} of {len(manifest.gate):,} criteria passed."
    rows = [_judged(*row) for row in account.criteria(manifest)]
    return f"<p>{decision}</p>" + _table("What the gate looked at, in order", ("Criterion", "Result", "Found"), rows)


def _preflight(manifest: Manifest) -> str:
    if not manifest.checks:
        return _say(account.NO_CHECKS)
    rows = [_judged(*row) for row in account.checks(manifest)]
    table = _table("Checks of the machine before the training", ("Check", "Result", "Found"), rows)
    return table + (_facts(account.gpus(manifest), "What the driver said of the GPUs") if manifest.gpus else "")


def _judged(name: str, status: str, found: str) -> tuple[str, str, str]:
    """A status has its colour, its mark and its word."""
    kind = status if status in _MARKS else "soft"
    return escape(name), f'<td class="{kind}">{_MARKS.get(status, escape(status))}</td>', escape(found)


def _data(manifest: Manifest) -> str:
    problems, ignored = manifest.dataset.problems, manifest.dataset.ignored_columns
    parts = [_facts(account.data(manifest), "What was read and used")]
    if problems:
        cells = [
            (f"{one.line:,}", "" if one.column is None else f"{one.column:,}", escape(clipped(one.reason)),
             escape(clipped(one.text)))
            for one in problems
        ]  # fmt: skip
        caption = "The first rows and cells that could not be used"
        parts.append(_table(caption, ("Line", "Column", "Reason", "Text"), cells))
    if ignored:
        columns = [(escape(clipped(one.name)), escape(clipped(one.reason))) for one in ignored]
        parts.append(_table("Columns that are no metrics", ("Column", "Reason"), columns))
    return "".join(parts)


def _scaler(manifest: Manifest) -> str:
    scaler = manifest.scaler
    cells = [
        (escape(clipped(name)), number(centre), number(scale))
        for name, centre, scale in zip(manifest.metric_names, scaler.centre, scaler.scale, strict=False)
    ]
    table = _table("scaled = (raw - centre) / scale", ("Metric", "Centre", "Scale"), cells)
    return f"<details><summary>Centre and scale of {len(cells):,} metrics</summary>{table}</details>"
