"""Tests the status page in a real browser, for a loaded server and for a fixture with GPUs."""

import re
import urllib.request

import pytest
from browser import CONTRASTS, OVERFLOWING, Browser
from metrics_fixture import MetricsFixture
from mixed_load import MixedLoad
from selenium.common.exceptions import WebDriverException
from server_process import ServerProcess

WIDTHS = (1280, 400)
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def fixture(binaries):
    with MetricsFixture(binaries) as running:
        yield running


@pytest.fixture(scope="module")
def loaded_server(binaries, slow_model):
    options = ("--model", str(slow_model.path), "--replicas", "2")
    with ServerProcess(binaries, *options) as server:
        with MixedLoad(server.grpc):
            ready = {"head": "default", "method": "ScoreStream", "code": "OK"}
            server.eventually(lambda: server.metric("logprobd_requests_total", **ready) > 20)
            yield server


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+) (µs|ms|s)", text).groups()
    return float(number) * UNITS[unit]


def figures(browser: Browser, section: str = "section.head") -> dict[str, str]:
    """Returns the large numbers of a section, keyed by their captions."""
    values, names = (browser.texts(f"{section} .figures {tag}") for tag in ("b", "span"))
    return dict(zip(names, values, strict=True))


def test_it_shows_the_head_and_its_load(browser, loaded_server) -> None:
    browser.open(f"http://{loaded_server.http}/?refresh=0", 1280)
    assert browser.driver.title == "logprobd: ready"
    assert browser.texts("header .badge") == ["ready"]
    text = browser.text()
    for fact in ("model.embed_tokens.weight (tied)", "40000 ids", "bf16, 19.5 MiB", "2 replicas"):
        assert fact in text, fact
    shown = figures(browser)
    assert float(shown["rows/s"].replace(",", "")) > 0
    assert float(shown["calls/s"]) > 0
    assert seconds(shown["p99 latency"]) > 0
    assert int(shown["nonfinite rows in total"].replace(",", "")) > 0
    assert shown["weights version"] == "1"
    # The layout shows two healthy replicas.
    assert browser.texts("section.head table td:last-child")[-2:] == ["ok", "ok"]


def test_its_figures_are_those_of_the_metrics(browser, loaded_server) -> None:
    browser.open(f"http://{loaded_server.http}/?refresh=0", 1280)
    rows = browser.texts("section:not(.head) table:has(td.draw) tr")
    latency = {}
    for row in rows[1:]:
        stage, count, *times = row.split("\t")
        if count != "0":
            latency[stage] = [seconds(each) for each in times[:3]]
    assert {"receive", "copy", "queue", "kernel", "reply"} <= latency.keys()
    for p50, p90, p99 in latency.values():
        assert 0 < p50 <= p90 <= p99
    # The kernel takes longer than parsing the requests, on the page and in the metrics.
    assert latency["kernel"][0] > latency["receive"][0]
    mean = loaded_server.metric(
        "logprobd_stage_duration_seconds_sum", stage="kernel"
    ) / loaded_server.metric("logprobd_stage_duration_seconds_count", stage="kernel")
    assert latency["kernel"][0] / 10 < mean < latency["kernel"][2] * 10


def test_its_latency_bars_are_as_long_as_their_figures(browser, loaded_server) -> None:
    browser.open(f"http://{loaded_server.http}/?refresh=0", 1280)
    rows = browser.run(
        "return [...document.querySelectorAll('section:not(.head) tr:has(td.draw)')].map(row => ["
        " row.cells[4].innerText,"
        " row.querySelector('rect').getBoundingClientRect().width,"
        " row.querySelector('svg').getBoundingClientRect().width])"
    )
    longest = max(seconds(text) for text, _, _ in rows)
    for text, bar, whole in rows:
        assert whole > 100
        # The tolerance is needed because the figures have three digits.
        assert bar / whole == pytest.approx(seconds(text) / longest, abs=0.01), text


def test_its_memory_bars_are_as_long_as_their_figures(browser, fixture) -> None:
    browser.open(f"http://{fixture.http}/?refresh=0", 1280)
    # tests/support/metrics_fixture.cc and fake_nvml.cc set this memory of the second GPU, in MiB.
    used, free = 60_000, 83_000
    own = {"weights": 1_187, "workspace": 900, "staging": 128}
    parts = [*own.values(), used - sum(own.values()), free]
    drawing = "svg[aria-label='memory of gpu1']"
    (whole,) = browser.widths(drawing)
    painted = browser.widths(f"{drawing} rect")
    assert whole > 300
    assert painted == pytest.approx([whole * part / sum(parts) for part in parts], abs=0.5)
    assert "gpu1, 139.6 GiB" in browser.text()
    assert "free 81.1 GiB" in browser.text()


def test_it_shows_gpus_and_what_is_wrong_with_them(browser, fixture) -> None:
    browser.open(f"http://{fixture.http}/?refresh=0", 1280)
    table = "section:has(th + th + th + th + th + th + th)"
    rows = [row.split("\t") for row in browser.texts(f"{table} tr")[1:]]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][3:] == ["42%", "350 W", "1980 MHz", "thermal, hw_slowdown"]
    assert rows[1][3:] == ["97%", "690 W", "1455 MHz", "power_cap"]
    assert all(float(row[1]) > 0 for row in rows)
    assert "failed" in browser.texts("section.head td b.alarm")
    assert browser.texts("header .badge") == ["ready, but 1 of 2 replicas has failed"]


def test_names_are_shown_verbatim_and_never_executed(browser, fixture) -> None:
    browser.open(f"http://{fixture.http}/?refresh=0", 1280)
    assert browser.texts("section.head h2 > span:first-child") == ["policy", "reference <2>"]
    assert "Warning: a model may say <b>anything</b> & more" in browser.text()
    assert browser.run("return document.scripts.length") == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["server", "fixture"])
def test_it_fits_the_window_and_loads_nothing_else(
    browser, loaded_server, fixture, which, width
) -> None:
    address = loaded_server.http if which == "server" else fixture.http
    browser.open(f"http://{address}/?refresh=0", width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(OVERFLOWING) == []
    assert browser.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.console() == []
    # No card overlaps another, and none is empty.
    boxes = browser.run(
        "return [...document.querySelectorAll('section')].map(e => {"
        " const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; })"
    )
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert right - left > 0.4 * min(width, 1180) - 40 and bottom - top > 60
        for other_left, other_top, other_right, other_bottom in boxes[:i]:
            apart = (
                left >= other_right
                or other_left >= right
                or top >= other_bottom
                or other_top >= bottom
            )
            assert apart
    seen_width, seen_height, lines = browser.picture()
    assert (seen_width, seen_height) == (width, 900)
    assert lines > 200  # a blank page has one distinct line


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_its_text_can_be_read(browser, fixture, is_dark) -> None:
    browser.open(f"http://{fixture.http}/?refresh=0", 1280, is_dark=is_dark)
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 60) == is_dark
    contrast, where = browser.run(CONTRASTS)[0]
    assert contrast >= 4.5, where


def test_it_reloads_itself(browser, loaded_server) -> None:
    browser.open(f"http://{loaded_server.http}/?refresh=1", 1280)
    loaded_at = "return performance.timeOrigin"
    first = browser.run(loaded_at)

    def is_new() -> bool:
        try:
            return browser.run(loaded_at) > first
        except WebDriverException:  # the page was just being replaced
            return False

    assert loaded_server.eventually(is_new, 10)
    browser.open(f"http://{loaded_server.http}/?refresh=0", 1280)


def test_its_links_have_targets(browser, loaded_server) -> None:
    browser.open(f"http://{loaded_server.http}/?refresh=0", 1280)
    links = browser.run("return [...document.querySelectorAll('nav a')].map(e => e.href)")
    assert len(links) == 4
    for link in links:
        with urllib.request.urlopen(link, timeout=5) as reply:
            assert reply.status == 200 and reply.read()


def test_a_client_that_does_not_accept_html_gets_text(loaded_server) -> None:
    status, text = loaded_server.get("/")
    assert status == 200
    assert text.startswith("logprobd ") and "\nengine " in text and "<" not in text
