#!/usr/bin/env python3
"""Writes Grafana's dashboard of logprobd from the panels in load_panels.py and health_panels.py.

  python3 deploy/monitoring/make_dashboard.py            writes grafana/dashboards/logprobd.json
  python3 deploy/monitoring/make_dashboard.py --check    exits with 1 if that file is out of date

Needs only Python. The data source is the first variable of the dashboard, so the file works without changes in any
Grafana from version 10 on.
"""

import argparse
import json
import pathlib
import sys

from health_panels import DEVICES, ERRORS, MEMORY, WEIGHTS
from load_panels import BATCHING, LATENCIES, OVERVIEW, SATURATION, THROUGHPUT
from panel import Kind, Panel
from promql import OURS

LOAD = (OVERVIEW, LATENCIES, THROUGHPUT, BATCHING, SATURATION)
ROWS = (*LOAD, MEMORY, DEVICES, ERRORS, WEIGHTS)
TARGET = pathlib.Path(__file__).resolve().parent / "grafana" / "dashboards" / "logprobd.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
# cuBLAS reaches 665 to 790 TFLOP/s for large bf16 products on one H200 (driver 580, 2026-11), falling with power.
PEAK_TFLOPS = 790
NOTHING = "No traffic"


def variable(
    name: str, label: str, query: str, *, multiple: bool = True, default: str = ""
) -> dict:
    """Returns a variable whose values come from Prometheus. Selects all of them, or `default`."""
    first = {"text": "All", "value": "$__all"} if multiple else {"text": default, "value": default}
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # refreshes when the time range changes
        "sort": 1,
        "multi": multiple,
        "includeAll": multiple,
        "allValue": ".*" if multiple else None,
        "current": first,
    }


def variables() -> list[dict]:
    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Data source",
            "query": "prometheus",
            "current": {},
            "regex": "",
        },
        variable("job", "Job", "label_values(logprobd_build_info, job)"),
        variable("instance", "Server", 'label_values(logprobd_build_info{job=~"$job"}, instance)'),
        variable("head", "Head", f"label_values(logprobd_ready{{{OURS}}}, head)"),
        variable("gpu", "GPU", f"label_values(logprobd_gpu_memory_bytes{{{OURS}}}, gpu)"),
        variable(
            "stage",
            "Stage",
            f"label_values(logprobd_stage_duration_seconds_count{{{OURS}}}, stage)",
            multiple=False,
            default="kernel",
        ),
        {
            "type": "textbox",
            "name": "peak_tflops",
            "label": "Peak TFLOP/s of a GPU",
            "query": str(PEAK_TFLOPS),
            "current": {"text": str(PEAK_TFLOPS), "value": str(PEAK_TFLOPS)},
        },
    ]


def thresholds(panel: Panel) -> dict:
    steps: list[dict] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {"mode": "absolute", "steps": steps}


def field_defaults(panel: Panel) -> dict:
    nothing = {"match": "null+nan", "result": {"text": NOTHING, "index": 0}}
    defaults = {
        "unit": panel.unit,
        "noValue": NOTHING,
        "mappings": [{"type": "special", "options": nothing}],
        "thresholds": thresholds(panel),
        "min": 0,
    }
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.highest is not None:
        defaults["max"] = panel.highest
    if panel.kind is Kind.LINES:
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


def overrides(panel: Panel) -> list[dict]:
    """Draws dashed lines for limits and for series that are measured differently from the others."""
    if panel.kind is not Kind.LINES:
        return []
    dashed = {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}}
    return [
        {"matcher": {"id": "byRegexp", "options": f"/{ending}$/"}, "properties": [dashed]}
        for ending in (" limit", " while busy")
        if any(query.legend.endswith(ending) for query in panel.queries)
    ]


def options(panel: Panel) -> dict:
    if panel.kind is Kind.STAT:
        has_limit = panel.red_above is not None or panel.red_below is not None
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background" if has_limit else "value",
            "graphMode": "area",
        }
    if panel.kind is Kind.HEATMAP:
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "filterValues": {"le": 1e-9},
            "tooltip": {"show": True, "yHistogram": True},
        }
    if panel.kind is Kind.TABLE:
        return {"showHeader": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def targets(panel: Panel) -> list[dict]:
    formats = {Kind.HEATMAP: "heatmap", Kind.TABLE: "table"}
    return [
        {
            "datasource": DATASOURCE,
            "refId": chr(ord("A") + index),
            "expr": query.expr,
            "legendFormat": query.legend or panel.title,
            "format": formats.get(panel.kind, "time_series"),
            "instant": panel.kind is Kind.TABLE,
            "range": panel.kind is not Kind.TABLE,
        }
        for index, query in enumerate(panel.queries)
    ]


def panel_json(panel: Panel, number: int, position: dict) -> dict:
    names = ", ".join(f"`{name}`" for name in panel.metrics())
    result = {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": f"{panel.about}\n\nMetrics: {names}",
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": field_defaults(panel), "overrides": overrides(panel)},
        "options": options(panel),
        "targets": targets(panel),
    }
    if panel.repeat:
        result |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": 4}
    if panel.kind is Kind.TABLE:
        hidden = {name: True for name in ("Time", "Value", "__name__")}
        result["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return result


def laid_out() -> list[dict]:
    """Returns the panels from left to right, in rows under their titles."""
    result: list[dict] = []
    number, x, y = 0, 0, 0

    def add(make, width: int, height: int) -> None:
        nonlocal number, x, y
        if x + width > COLUMNS:
            x, y = 0, y + tallest
        number += 1
        result.append(make(number, {"x": x, "y": y, "w": width, "h": height}))
        x += width

    def row_json(title: str):
        return lambda number, position: {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": position,
            "panels": [],
        }

    for row in ROWS:
        tallest = 1
        add(row_json(row.title), COLUMNS, 1)
        for panel in row.panels:
            height = 4 if panel.kind is Kind.STAT else 8
            width = COLUMNS if panel.repeat else panel.width or row.width
            add(lambda *where, panel=panel: panel_json(panel, *where), width, height)
            tallest = height
        x, y = 0, y + tallest
    return result


def dashboard() -> dict:
    return {
        "title": "logprobd",
        "uid": "logprobd",
        "description": "Scores tokens against language model heads."
        " Generated by deploy/monitoring/make_dashboard.py.",
        "tags": ["logprobd"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": variables()},
        "panels": laid_out(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the file without writing it")
    check = parser.parse_args().check
    text = json.dumps(dashboard(), indent=2) + "\n"
    if not check:
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print(f"{TARGET} differs from the panels: run {sys.argv[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
