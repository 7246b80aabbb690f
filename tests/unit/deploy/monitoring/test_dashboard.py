"""The committed dashboard is the one that the panels define, and any Grafana can import it."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

MONITORING = pathlib.Path(__file__).resolve().parents[4] / "deploy" / "monitoring"
sys.path.insert(0, str(MONITORING))

import make_dashboard  # noqa: E402
from panel import Kind  # noqa: E402

DASHBOARD = json.loads(make_dashboard.TARGET.read_text())
DRAWN = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def by_title(panels) -> list:
    return [pytest.param(panel, id=panel["title"]) for panel in panels]


def test_check_says_whether_the_file_is_what_the_panels_say(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["make_dashboard.py", "--check"])
    assert make_dashboard.main() == 0
    changed = tmp_path / "logprobd.json"
    changed.write_text(make_dashboard.TARGET.read_text().replace("Latency p95", "Latency p96"))
    monkeypatch.setattr(make_dashboard, "TARGET", changed)
    assert make_dashboard.main() == 1
    assert "run" in capsys.readouterr().err
    changed.unlink()
    assert make_dashboard.main() == 1


def test_it_is_written_by_a_bare_python(tmp_path) -> None:
    script = MONITORING / "make_dashboard.py"
    result = subprocess.run(["/usr/bin/python3", script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_writing_gives_the_same_file(tmp_path, monkeypatch) -> None:
    target = tmp_path / "logprobd.json"
    monkeypatch.setattr(make_dashboard, "TARGET", target)
    monkeypatch.setattr(sys, "argv", ["make_dashboard.py"])
    assert make_dashboard.main() == 0
    assert json.loads(target.read_text()) == DASHBOARD


def test_no_data_source_is_hard_wired() -> None:
    def sources(node) -> list:
        if isinstance(node, dict):
            own = [node["datasource"]] if "datasource" in node else []
            return own + [found for value in node.values() for found in sources(value)]
        if isinstance(node, list):
            return [found for value in node for found in sources(value)]
        return []

    found = sources(DASHBOARD)
    assert len(found) > 2 * len(DRAWN)
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in found)


def test_rows_are_those_of_the_plan() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert titles == [
        "Overview",
        "Latency",
        "Throughput",
        "Batching",
        "Saturation",
        "Memory",
        "GPUs and process",
        "Errors",
        "Weights",
    ]


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("panel", by_title(DRAWN))
def test_a_panel_says_what_it_shows_and_from_which_metrics(panel) -> None:
    about, named = panel["description"].split("\n\nMetrics: ")
    assert about.endswith(".")
    exprs = " ".join(target["expr"] for target in panel["targets"])
    for metric in re.findall(r"`(\w+)`", named):
        assert metric in exprs
    asked = set(re.findall(r"\blogprobd_\w+|\bprocess_\w+", exprs))
    assert all(any(name.startswith(m) for m in re.findall(r"`(\w+)`", named)) for name in asked)
    assert panel["fieldConfig"]["defaults"]["noValue"] == "No traffic"


@pytest.mark.parametrize("panel", by_title(DRAWN))
def test_a_panel_keeps_to_the_variables(panel) -> None:
    known = {each["name"] for each in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    for target in panel["targets"]:
        expr = target["expr"]
        assert set(re.findall(r"\$(\w+)", expr)) <= known
        for selector in re.findall(r"\b(?:logprobd_\w+|process_\w+|up)\{([^}]*)\}", expr):
            assert 'job=~"$job", instance=~"$instance"' in selector
        # A rate over a fixed window shows nothing or too much when the user changes the time range.
        assert not re.search(r"rate\([^)]*\[\d", expr)


def test_heatmaps_and_tables_ask_in_their_own_format() -> None:
    kinds = {panel["type"]: {t["format"] for t in panel["targets"]} for panel in DRAWN}
    assert kinds[Kind.HEATMAP.value] == {"heatmap"}
    assert kinds[Kind.TABLE.value] == {"table"}
    assert kinds[Kind.LINES.value] == {"time_series"}


def test_dashes_and_limits_are_where_the_panel_asks_for_them() -> None:
    share = [panel for panel in DRAWN if panel["title"] == "Share of peak"][-1]
    assert share["fieldConfig"]["overrides"][0]["matcher"]["options"] == "/ while busy$/"
    down = next(panel for panel in DRAWN if panel["title"] == "Servers up")
    assert down["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "red"
    faults = next(panel for panel in DRAWN if panel["title"] == "Faults")
    assert faults["fieldConfig"]["defaults"]["thresholds"]["steps"][1] == {
        "color": "red",
        "value": 0.01,
    }
