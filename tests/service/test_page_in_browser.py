"""The page of a version in a real browser, as the service published it: nothing asked for, nothing complained of."""

import sys
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from builders import HOSTILE, JOB_ID, NOW, OTHER_ID, make_bare, make_manifest

from retraind.report import Candidate, Manifest
from retraind.supervisor.publish import Publisher

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is installed")

NAMES = [HOSTILE, "n" * 500, *(f"/proc/net/dev:eth{index}.rx_bytes" for index in range(300))]


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.Browser(PROGRAM) as started:
        yield started


def published(manifest: Manifest, publisher: Publisher, job_id: str) -> Path:
    """The page on disk of a version with these facts."""
    facts = {name: getattr(manifest, name) for name in Candidate.__struct_fields__ if hasattr(manifest, name)}
    weights = publisher.models_dir.parent / f"{job_id}.pt"
    weights.write_bytes(b"weights")
    candidate = Candidate(**{**facts, "tensors": [], "expected": []})
    made = publisher.publish(candidate, weights, job_id, NOW, gate=manifest.gate)
    return publisher.versions_dir / made.version / "report.html"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a first version of which little is known, and of the next, of which everything is."""
    publisher = Publisher(tmp_path_factory.mktemp("page") / "models", "telemetry_autoencoder")
    publisher.open()
    bare = published(make_bare(), publisher, JOB_ID)
    return {"bare": bare, "full": published(make_manifest(NAMES), publisher, OTHER_ID)}


@pytest.mark.parametrize("name", ["bare", "full"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_fits_asks_for_nothing_and_is_nothing_to_complain_of(
    width: int, scheme: str, name: str, chromium: browser.Browser, pages: dict[str, Path]
) -> None:
    url = pages[name].as_uri()
    chromium.open(url, width=width, scheme=scheme)
    for folded in ("false", "true"):
        chromium.value(f"document.querySelectorAll('details').forEach(one => one.open = {folded})")
        assert chromium.value("document.documentElement.scrollWidth") <= width
    assert [event["request"]["url"] for event in chromium.seen("Network.requestWillBeSent")] == [url]
    for complaint in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Audits.issueAdded"):
        assert chromium.seen(complaint) == []
    assert chromium.seen("Page.javascriptDialogOpening") == []
    assert chromium.value("document.querySelectorAll('script, img').length") == 0
    assert chromium.value("document.querySelectorAll('svg').length") == {"bare": 1, "full": 3}[name]


def luminance(colour: str) -> float:
    """Of "rgb(1, 2, 3)", by the definition of the Web Content Accessibility Guidelines."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_text_stands_out_from_its_ground(scheme: str, chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["full"].as_uri(), width=1280, scheme=scheme)
    ground = {"figure": "figure", "svg text": "figure", "li": "ul.verdicts li"}
    for selector in ("body", "th", "thead th", "caption", "summary", ".pass", ".warn", "li b", "figure", "svg text"):
        kind = "fill" if selector == "svg text" else "color"
        style = f"getComputedStyle(document.querySelector('{selector}')).{kind}"
        behind = f"getComputedStyle(document.querySelector('{ground.get(selector, 'body')}')).backgroundColor"
        lighter, darker = sorted((luminance(chromium.value(style)), luminance(chromium.value(behind))), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, selector


def test_the_browser_would_tell_of_a_page_that_asks_and_complains(chromium: browser.Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    path.write_text(f"{policy}<img src=x.png><p style='width:5000px'>wide</p><script>console.log(1)</script>")
    chromium.open(path.as_uri(), width=375)
    assert chromium.seen("Log.entryAdded")
    path.write_text("<img src=x.png><p style='width:5000px'>wide</p><script>console.log(1)</script>")
    chromium.open(path.as_uri(), width=1280)
    assert chromium.value("document.documentElement.scrollWidth") > 1280
    assert len(chromium.seen("Network.requestWillBeSent")) == 2
    assert chromium.seen("Runtime.consoleAPICalled")
