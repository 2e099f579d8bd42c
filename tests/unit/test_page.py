"""The page of a version: made of facts alone, whole whatever they are, and nothing in it from data is markup."""

import math
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
import pytest
from builders import HOSTILE, make_bare, make_manifest, make_training

from retraind.report import (
    Check,
    Comparison,
    Evaluation,
    Gpu,
    Histogram,
    MetricShare,
    Scaler,
    ScoredRow,
    ScoreSeries,
    Threshold,
)
from retraind.supervisor import account, page_plots
from retraind.supervisor.page import render

ODD = (HOSTILE, "\x00\x1b[31m", "\ud800", "\u202egnp", "x" * 2000, "", "a\nb", "]]>", "<!--")
VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Tags, attributes and text as a browser sees them; tags that are not closed in order are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)
    names = [value for name, value in reader.attributes if name == "id"]
    assert len(names) == len(set(names))
    return reader


def text_of(page: str) -> str:
    return " ".join(read(page).text.split())


def test_the_page_says_what_was_published_from_what_and_whether_it_is_better() -> None:
    manifest = make_manifest(["cpu", "load"])
    text = text_of(render(manifest, msgspec.structs.replace(manifest, version="000041-aaaaaaaaaaaa")))
    for words in (
        "Published 2026-11-30 22:52:12 UTC from cpu: 10 rows of 2 metrics.",
        "Better than predicting each metric's mean: mean error 0.25 against 1, on the held-out rows (75 % lower).",
        "Worse than 8 principal components: mean error 0.25 against 0.2, on the held-out rows (25 % higher).",
        "Better than version 000041-aaaaaaaaaaaa, which was published: mean error 0.25 against 0.5, on the same",
        "9,023 7.5 cpu 62 % (z -8.3)",
        "900 rows with scores from 0 to 0.5",
        "rows 9,020 to 9,029: score 7.5",
        "epoch 5, held-out: 0.65",
        "Published: 1 of 1 criteria passed.",
        "Both have the same metrics.",
        "0.5: 0.1 % of normal rows are expected above it",
        "cpu; make room",
    ):  # fmt: skip
        assert words in text, words


def test_what_the_data_lacks_is_counted_by_metric() -> None:
    facts = dict(account.data(make_manifest(["cpu", "load"])))
    assert facts["missing cells"] == "4 of 20: 4 of cpu"


@pytest.mark.parametrize("name", ODD)
def test_a_name_from_data_is_text_wherever_it_stands(name: str) -> None:
    manifest = make_manifest([name, "load"])
    page = render(manifest, make_manifest(["other", "load"]))
    plain = read(render(make_manifest(["cpu", "load"]), make_manifest(["other", "load"])))
    reader = read(page)
    assert (reader.tags, len(reader.attributes)) == (plain.tags, len(plain.attributes)), "no name makes a tag"
    assert "script" not in reader.tags
    assert all(shown in "\n\u2713\u2717" or shown.isprintable() for shown in page)
    page.encode()


def test_a_page_needs_nothing_but_itself_and_forbids_the_rest() -> None:
    page = render(make_manifest(["cpu", "load"]), None)
    reader = read(page)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in reader.attributes
    assert not {"script", "img", "link", "iframe", "object", "form", "a"} & set(reader.tags)
    assert not {name for name, _ in reader.attributes if name.startswith("on") or name in ("src", "href")}
    assert "url(" not in page
    assert "@import" not in page


def test_a_version_of_which_little_is_known_has_sentences_in_the_place_of_plots() -> None:
    manifest = make_bare()
    text = text_of(render(manifest, None))
    assert text.count("No scores of held-out rows are known") == 2
    for words in (
        "No single rows are known",
        "errors of single metrics are not known",
        "gate looked at is not known",
        "No version that was live before is known",
        "checks before the training found is not known",
    ):
        assert words in text
    one_epoch = msgspec.structs.replace(manifest, training=make_training(epochs=1, epoch_losses=[0.5]))
    page = render(one_epoch, None)
    assert "<svg" not in page
    assert "too few losses for a curve; the last one is 0.5" in text_of(page)


def test_no_held_out_rows_are_said_so() -> None:
    evaluation = Evaluation(num_heldout_rows=0, heldout_loss=0.5, mean_loss=0.5)
    text = text_of(render(msgspec.structs.replace(make_bare(), evaluation=evaluation), None))
    assert "Neither better nor worse than predicting each metric's mean" in text
    assert "on the rows that it learned from (none were held out)" in text


def test_hundreds_of_metrics_are_all_there_and_most_are_folded_away() -> None:
    names = [f"metric-{index}" for index in range(700)]
    manifest = make_manifest(names)
    page = render(manifest, None)
    shown, _, folded = page.partition("Error of each metric</h2>")[2].partition("<details>")
    errors = folded.partition("</details>")[0]
    assert [name for name in names if f">{name}<" in shown] == names[:15]
    assert [name for name in names if f">{name}<" in errors] == names[15:]
    assert "The other 685" in errors
    scaler = page.partition("Scaler</h2>")[2]
    assert all(f">{name}<" in scaler for name in names)
    assert len(page) < 1000 * len(names)


def test_thousands_of_metrics_are_cut_and_the_rest_is_said_to_be_in_the_manifest() -> None:
    page = render(make_manifest([f"metric-{index}" for index in range(9000)]), None)
    text = text_of(page)
    assert text.count("7,000 more stand in manifest.json.") == 2
    assert ">metric-1999<" in page
    assert ">metric-2000<" not in page
    assert len(page) < 2**20


def test_errors_that_are_all_zero_are_a_sentence() -> None:
    evaluation = msgspec.structs.replace(make_manifest(["a", "b"]).evaluation, metric_errors=[0.0, 0.0])
    text = text_of(render(make_manifest(["a", "b"], evaluation=evaluation), None))
    assert "The error of each of the 2 metrics is 0." in text


ODD_NUMBERS = (0.0, -0.0, 5e-324, 1e-300, 1e-9, 0.5, 1.0, 1.0 + 1e-15, 3.0, 1e6, 1e15, 1e300, 1.7e308, -1.0, -1.7e308)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_figures_are_the_page_is_whole(seed: int) -> None:
    chance = random.Random(seed)
    odd = (*ODD_NUMBERS, math.nan, math.inf, -math.inf) if seed % 2 else ODD_NUMBERS

    def some(most: int) -> list[float]:
        kind = chance.choice([odd, odd, (chance.choice(odd),), ODD_NUMBERS[4:9]])
        return [chance.choice(kind) for _ in range(chance.randrange(most))]

    def one() -> float:
        return chance.choice(odd)

    def count() -> int:
        return chance.choice([0, 1, 2, 10, 10**9, 2**63, -1])

    edges = some(20)
    histogram = Histogram(
        edges=sorted(edges) if seed % 3 else edges, counts=[count() for _ in range(max(0, len(edges) - 1))]
    )
    metrics = [MetricShare(name="cpu", share=one(), z=one())]
    evaluation = Evaluation(
        num_heldout_rows=count(), heldout_loss=one(), mean_loss=one(), pca_loss=one(), histogram=histogram,
        threshold=Threshold(value=one(), target_share=one(), expected_share=one(), num_rows=count()),
        metric_errors=some(9), worst_rows=[ScoredRow(row=count(), score=one(), metrics=metrics) for _ in range(3)],
        scores=ScoreSeries(first_row=count(), rows_per_point=count(), maxima=some(2000)),
        comparison=Comparison(version="x", published_error=one(), candidate_error=one(), num_rows=3),
    )  # fmt: skip
    training = make_training(
        epoch_losses=some(30), heldout_losses=some(900), seconds=one(), rows_per_second=one(), epochs=count()
    )
    scaler = Scaler(centre=some(4), scale=some(4))
    manifest = make_manifest(["a", "b", "c"], evaluation=evaluation, training=training, scaler=scaler)
    page = render(manifest, msgspec.structs.replace(manifest, version="000041-aaaaaaaaaaaa"))
    read(page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        marks = re.sub(r"<title>.*?</title>|<text.*?</text>", "", svg)
        assert not re.search(r"[ \"]-?(nan|inf|\d+e)", marks)
        for value in re.findall(r' (?:x|y|cx|cy)="([^"]+)"', marks):
            assert -1 <= float(value) <= 500


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.123456, "0.123"), (12.3456, "12.3"), (999.4, "999"), (999.6, "1,000"), (1234567.8, "1,234,568"),
        (1e7, "1e7"), (0.00012345, "0.000123"), (0.00001, "1e-5"), (-3.14159, "-3.14"), (1.7e308, "1.7e308"),
        (None, "unknown"), (math.nan, "not a number"), (-math.inf, "infinite"),
    ],
)  # fmt: skip
def test_a_number_is_written_for_people(value: float | None, text: str) -> None:
    assert account.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (12.4, "12 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"),
     (math.nan, "not a number s"), (-1, "-1 s")],
)  # fmt: skip
def test_a_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert account.duration(seconds) == text


@pytest.mark.parametrize(
    ("values", "is_whole", "ticks"),
    [
        ([0, 1], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.5, 1], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([1, 20], True, ["5", "10", "15", "20"]),
        ([1, 2], True, ["1", "2"]),
        ([0, 800], True, ["0", "200", "400", "600", "800"]),
        ([0.001, 1], False, ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1"]),
        ([1e-12, 1e12], False, ["1e-12", "1e-7", "0.01", "1,000", "1e8"]),
        ([5.0, 5.0], False, ["0", "1", "2", "3", "4", "5"]),
        ([0.0, 0.0], False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round_and_few(values: list[float], ticks: list[str], *, is_whole: bool) -> None:
    scale = page_plots.Scale(values, 0, 100, whole=is_whole)
    assert [account.number(tick) for tick in scale.ticks()] == ticks
    assert 0 <= scale.at(values[0]) <= scale.at(values[-1]) <= 100


def test_an_old_version_beside_a_new_one_tells_which_metrics_came_and_went() -> None:
    text = text_of(render(make_manifest(["cpu", "load"]), make_manifest(["cpu", "memory"])))
    assert "New metrics: load. No longer there: memory." in text


def test_the_figures_of_a_gpu_are_one_line_and_what_is_not_told_is_left_out() -> None:
    gpu = Gpu(
        index=0, uuid="GPU-1", name="Card", pci_address="0000:65:00.0", driver_version="550.54", kernel_module="550.54",
        memory_free_bytes=3 * 2**29, memory_total_bytes=16 * 2**30, temperature_celsius=0, pstate=0,
        pcie_generation=1, pcie_max_generation=4, pcie_width=16,
    )  # fmt: skip
    assert account.describe_gpu(gpu) == (
        "Card, GPU-1, 0000:65:00.0, driver 550.54, kernel module 550.54, 1.5 of 16.0 GiB free, 0 C, P0, "
        "PCIe gen 1 of 4, width 16"
    )
    assert account.describe_gpu(Gpu(index=1)) == ""
    assert account.gpus(make_manifest(["cpu"]))[0][0] == "GPU 0 (chosen)"


def test_neighbours_that_are_skipped_for_one_reason_are_one() -> None:
    def check(name: str, status: str, message: str) -> Check:
        return Check(name=name, status=status, message=message)

    found = [check("a", "skip", "off"), check("b", "pass", "on"), check("c", "pass", "on"), check("d", "skip", "off"),
             check("e", "skip", "off"), check("f", "skip", "off"), check("g", "skip", "other")]  # fmt: skip
    shown = [(one.name, one.status, one.message) for one in account.folded(found)]
    assert shown == [
        ("a", "skip", "off"), ("b", "pass", "on"), ("c", "pass", "on"), ("d and 2 more", "skip", "off"),
        ("g", "skip", "other"),
    ]  # fmt: skip
