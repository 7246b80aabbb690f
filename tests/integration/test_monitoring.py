"""Tests the dashboard and the rules in a real Prometheus, which scrapes a loaded server and a fixture with GPUs."""

import math
import re
import shutil
import subprocess
import sys

import pytest
from metrics_fixture import MetricsFixture
from mixed_load import MixedLoad
from prometheus_server import PrometheusServer
from scoring_rpc import ROOT
from server_process import ServerProcess

MONITORING = ROOT / "deploy" / "monitoring"
sys.path.insert(0, str(MONITORING))

import make_dashboard  # noqa: E402

RULES = MONITORING / "prometheus" / "logprobd.rules.yml"
PANELS = [panel for row in make_dashboard.ROWS for panel in row.panels]
# Metrics that the server of these tests has not, or zero: it has neither a GPU nor TLS.
ONLY_IN_FIXTURE = re.compile("gpu|flops|collective|host_pinned|insecure|tls")
# Panels that show nothing above zero on it, whatever the load.
QUIET = {
    *("Servers unreachable", "Replicas failed", "Faults", "Share of faults by head", "Swaps"),
    *("Rows waiting", "Oldest in the queue", "Requests waiting", "Bytes held for requests"),
    *("Shared with clients", "Shared memory of clients", "Lost log lines"),
}
# The only panel that stays at zero while all servers are reachable, whatever the load.
NEVER_SHOWS = "Servers unreachable"
SECONDS = 30  # enough for a slow machine; values usually appear after a few seconds


@pytest.fixture(scope="module")
def fixture(binaries):
    with MetricsFixture(binaries) as running:
        yield running


@pytest.fixture(scope="module")
def loaded_server(binaries, slow_model):
    with ServerProcess(binaries, "--model", str(slow_model.path)) as server:
        with MixedLoad(server.grpc):
            yield server


@pytest.fixture(scope="module")
def prometheus(loaded_server, fixture, tmp_path_factory):
    targets = {"logprobd": [loaded_server.http, fixture.http]}
    with PrometheusServer(tmp_path_factory.mktemp("prometheus"), targets, RULES) as server:
        yield server


def substituted(expr: str, instance: str) -> str:
    """Fills in the variables of the dashboard as Grafana does."""
    values = {
        "job": "logprobd",
        "instance": re.escape(instance),
        "head": ".*",
        "gpu": ".*",
        "stage": "kernel",
        "peak_tflops": str(make_dashboard.PEAK_TFLOPS),
        "__rate_interval": "5s",
    }
    filled = re.sub(r"\$(\w+)", lambda name: values[name[1]], expr)
    return filled.replace("\\", "\\\\")  # PromQL strings need escaped backslashes


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_each_query_of_a_panel_gives_numbers(prometheus, loaded_server, fixture, panel) -> None:
    # The fixture reports a GPU, TLS and faults.
    only_in_fixture = any(map(ONLY_IN_FIXTURE.search, panel.metrics()))
    is_quiet = panel.title in QUIET
    cases = [(fixture.http, (only_in_fixture or is_quiet) and panel.title != NEVER_SHOWS)]
    if not only_in_fixture:
        cases.append((loaded_server.http, not is_quiet))
    for instance, is_above_zero in cases:
        for query in panel.queries:
            expr = substituted(query.expr, instance)
            values = prometheus.wait_for_values(expr, SECONDS, above_zero=is_above_zero)
            assert values, f"no series: {expr}"
            assert all(map(math.isfinite, values)), (expr, values)
            if is_above_zero:
                assert max(values) > 0, (expr, values)


def test_each_variable_of_the_dashboard_has_values(prometheus) -> None:
    for each in make_dashboard.variables():
        if each["type"] != "query":
            continue
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", each["definition"]).groups()
        everything = re.sub(r"\$\w+", ".*", metric)
        expr = f"group by ({label}) ({everything})"
        assert prometheus.wait_for_values(expr, SECONDS, above_zero=True), expr


def test_every_rule_evaluates_and_records(prometheus) -> None:
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 30
    for rule in rules:
        if rule["type"] == "recording":
            values = prometheus.wait_for_values(rule["name"], SECONDS, above_zero=True)
            assert values and max(values) > 0, rule["name"]
    for rule in (rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]):
        assert rule["health"] == "ok", rule


def test_an_alert_fires_for_what_happens_to_a_real_server(prometheus, loaded_server) -> None:
    firing = (
        'ALERTS{alertname="LogprobdNonFiniteLogits", alertstate="firing", '
        f'instance="{loaded_server.http}", head="default", severity="page"}}'
    )
    assert prometheus.wait_for_values(firing, SECONDS, above_zero=True) == [1.0]
    silent = f'ALERTS{{alertname="LogprobdDown", instance="{loaded_server.http}"}}'
    assert prometheus.values(silent) == []


def test_metrics_of_gpus_and_of_two_heads_pass_promtool(fixture) -> None:
    result = subprocess.run(
        [shutil.which("promtool"), "check", "metrics"],
        input=fixture.metrics(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_panels_query_metrics_that_are_served(fixture) -> None:
    served = set(re.findall(r"^# TYPE (\S+)", fixture.metrics(), re.MULTILINE)) | {"up"}
    for panel in PANELS:
        assert panel.metrics(), panel.title
        assert set(panel.metrics()) <= served, panel.title


def test_every_metric_that_is_served_is_on_the_dashboard(fixture) -> None:
    served = set(re.findall(r"^# TYPE (\S+)", fixture.metrics(), re.MULTILINE))
    shown = {name for panel in PANELS for name in panel.metrics()}
    # Other panels show the queue in rows and resident memory instead of these metrics.
    left_out = {"logprobd_queue_bytes", "process_virtual_memory_bytes"}
    assert served - shown == left_out
