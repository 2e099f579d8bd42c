"""Plots of a version's page as inline SVG: losses by epoch, a histogram of scores, scores over rows.

Pure, no script, no outside reference; the colours are the page's classes. A plot is as wide as its place and drawn so
that its text can be read on a phone. What can not be plotted gives None, and the page says so. Costs a millisecond
each: points beyond what a screen can show are thinned, keeping the largest.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from retraind.report import Histogram, ScoreSeries
from retraind.supervisor.account import number

_WIDTH, _HEIGHT = 440, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 24, 42
_MAX_POINTS = 400
_MAX_MARKS = 60
# From which ratio on small values would lie flat on the axis.
_LOG_RATIO = 50
# Beyond these a float's own arithmetic gives out.
_TINY, _HUGE = 1e-280, 1e280
_MOST = 10**15  # rows


class Scale:
    """From values to a coordinate: linear, or logarithmic where the values ask for it and are positive."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, whole: bool = False) -> None:
        """`whole` values are counts or numbers of epochs and rows: linear, with ticks at whole numbers."""
        low, high = min(values), max(values)
        self.is_log = not whole and low > 0 and high / low > _LOG_RATIO
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
        elif low > 0 and not whole:
            low = 0.0
        if high - low < max(_TINY, 1e-9 * abs(high)):
            low, high = min(low, 0.0), max(2 * abs(high), 1.0 if high < _TINY or whole else 0.0)
        self._low, self._high, self._whole = low, high, whole
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """The coordinate, kept within the plot."""
        seen = math.log10(max(value, _TINY)) if self.is_log else value
        share = (seen - self._low) / (self._high - self._low)
        return self._start + min(1.0, max(0.0, share)) * (self._end - self._start)

    def ticks(self, num_wanted: int = 5) -> list[float]:
        """Round values within the range."""
        if self.is_log:
            return self._log_ticks(num_wanted)
        step = self._step((self._high - self._low) / num_wanted)
        first, last = math.ceil(self._low / step - 1e-9), math.floor(self._high / step + 1e-9)
        return [index * step for index in range(first, min(last, first + 20) + 1)]

    def _step(self, least: float) -> float:
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
        return max(1.0, float(round(step))) if self._whole else step

    def _log_ticks(self, num_wanted: int) -> list[float]:
        first, last = math.floor(self._low), math.ceil(self._high)
        stride = max(1, math.ceil((last - first) / num_wanted))
        factors = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
        found = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        return [tick for tick in found if self._low - 1e-9 <= math.log10(tick) <= self._high + 1e-9]


def losses(training: Sequence[float], heldout: Sequence[float]) -> str | None:
    """Losses by epoch: of training drawn through, of held-out rows dashed."""
    lines = {"training": _kept(training), "held-out": _kept(heldout)}
    values = [value for line in lines.values() for value in line]
    longest = max(len(line) for line in lines.values())
    if longest < 2 or len(values) != len(training) + len(heldout):
        return None
    x = Scale([1, longest], _LEFT, _WIDTH - _RIGHT, whole=True)
    y = Scale(values, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(x, y, "epoch", "loss")]
    for kind, (name, line) in zip(("a", "b"), lines.items(), strict=True):
        points = [(x.at(epoch), y.at(loss)) for epoch, loss in enumerate(line, 1)]
        if len(points) > _MAX_POINTS:
            points = points[:: len(points) // _MAX_POINTS] + points[-1:]
        parts.append(_line(points, kind))
        if len(line) <= _MAX_MARKS:
            parts += [
                _mark(*point, kind, f"epoch {epoch}, {name}: {number(loss)}")
                for epoch, (point, loss) in enumerate(zip(points, line, strict=True), 1)
            ]
    shown = [(kind, name) for kind, (name, line) in zip(("a", "b"), lines.items(), strict=True) if line]
    parts += _legend(shown)
    return _svg(parts, "Loss by epoch")


def histogram(found: Histogram | None) -> str | None:
    """How many held-out rows have which score, and where the threshold is."""
    if found is None:
        return None
    edges, counts = _kept(found.edges), [min(max(0, count), _MOST) for count in found.counts]
    if len(edges) != len(counts) + 1 or edges != sorted(edges) or not any(counts):
        return None
    positive = [edge for edge in edges if edge > _TINY]
    x = Scale([*(positive if _is_geometric(positive) else [0.0, *edges]), 1.0], _LEFT, _WIDTH - _RIGHT)
    y = Scale([0, max(counts)], _HEIGHT - _BOTTOM, _TOP, whole=True)
    parts = [*_axes(x, y, "score", "rows")]
    for (low, high), count in zip(pairwise(edges), counts, strict=True):
        if count:
            left, right = x.at(low), x.at(high)
            top = min(y.at(count), _HEIGHT - _BOTTOM - 1.5)  # one row among thousands is still to be seen
            kind = "c" if low >= 1 else "a"
            width, height = max(1.0, right - left - 0.7), _HEIGHT - _BOTTOM - top
            title = f"<title>{count:,} rows with scores from {number(low)} to {number(high)}</title>"
            place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            parts.append(f'<rect class="fill-{kind}" {place}>{title}</rect>')
    at = x.at(1.0)
    is_right = at > _WIDTH * 0.7
    parts.append(f'<path class="limit" d="M{at:.1f} {_TOP - 4}V{_HEIGHT - _BOTTOM}"/>')
    anchor, shift = ("end", -5) if is_right else ("start", 5)
    parts.append(f'<text x="{at + shift:.1f}" y="{_TOP + 4}" text-anchor="{anchor}">threshold</text>')
    return _svg(parts, "Held-out scores")


def scores(series: ScoreSeries | None) -> str | None:
    """The largest score of each stretch of held-out rows, and the threshold."""
    values = _kept(series.maxima) if series else []
    if series is None or len(values) < 2 or len(values) != len(series.maxima):
        return None
    stride = math.ceil(len(values) / _MAX_POINTS)
    values = [max(values[start : start + stride]) for start in range(0, len(values), stride)]
    width = min(max(1, series.rows_per_point), _MOST) * stride
    rows = [min(max(0, series.first_row), _MOST) + width * index for index in range(len(values))]
    x = Scale([rows[0], rows[-1]], _LEFT, _WIDTH - _RIGHT, whole=True)
    y = Scale([*values, 1.0], _HEIGHT - _BOTTOM, _TOP)
    points = [(x.at(row), y.at(value)) for row, value in zip(rows, values, strict=True)]
    limit = y.at(1.0)
    parts = [*_axes(x, y, "row", "score"), _line(points, "a")]
    parts.append(f'<path class="limit" d="M{_LEFT} {limit:.1f}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{_WIDTH - _RIGHT - 4}" y="{max(12.0, limit - 5):.1f}" text-anchor="end">threshold</text>')
    above = sorted((value, point, row) for value, point, row in zip(values, points, rows, strict=True) if value > 1)
    for value, point, row in above[-_MAX_MARKS:]:
        where = f"row {row:,}" if width == 1 else f"rows {row:,} to {row + width - 1:,}"
        parts.append(_mark(*point, "c", f"{where}: score {number(value)}"))
    return _svg(parts, "Scores over the held-out rows")


def _kept(values: Sequence[float]) -> list[float]:
    finite = (float(value) for value in values if math.isfinite(value) and abs(value) < _HUGE)
    return [value if abs(value) > _TINY else 0.0 for value in finite]


def _is_geometric(edges: Sequence[float]) -> bool:
    """Edges that grow by a factor ask for a logarithmic axis; those that grow by a step do not."""
    return len(edges) > 3 and math.isclose(edges[1] / edges[0], edges[-1] / edges[-2], rel_tol=0.01)


def _axes(x: Scale, y: Scale, x_name: str, y_name: str) -> Iterator[str]:
    bottom = _HEIGHT - _BOTTOM
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>'
    for tick in x.ticks():
        at = x.at(tick)
        yield f'<path class="axis" d="M{at:.1f} {bottom}v4"/>'
        anchor = "end" if at > _WIDTH - 30 else "middle"
        yield f'<text x="{min(at, _WIDTH - 2):.1f}" y="{bottom + 17}" text-anchor="{anchor}">{number(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>'
    logs = {True: " (log scale)", False: ""}
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{x_name}{logs[x.is_log]}</text>'
    yield f'<text x="4" y="12">{y_name}{logs[y.is_log]}</text>'


def _line(points: Sequence[tuple[float, float]], kind: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="line-{kind}" points="{text}"/>'


def _mark(x: float, y: float, kind: str, title: str) -> str:
    """A disc, or a square for the second line: to be told apart without colours."""
    if kind == "b":
        shape = f'<rect class="fill-b" x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5">'
        return f"{shape}<title>{title}</title></rect>"
    return f'<circle class="fill-{kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"><title>{title}</title></circle>'


def _legend(shown: Sequence[tuple[str, str]]) -> Iterator[str]:
    x = _WIDTH - _RIGHT - 96 * len(shown)
    for kind, name in shown:
        yield f'<path class="line-{kind}" d="M{x} 8h22"/><text x="{x + 27}" y="12">{name}</text>'
        x += 96


def _svg(parts: Sequence[str], title: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>{inside}</svg>'
