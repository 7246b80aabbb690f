"""Recording rules and alerts are valid, and each alert has test cases and an entry in the runbook."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[4]
MONITORING = ROOT / "deploy" / "monitoring"
sys.path.insert(0, str(MONITORING))

import promql  # noqa: E402

RULES = MONITORING / "prometheus" / "logprobd.rules.yml"
CASES = sorted((MONITORING / "prometheus" / "tests").glob("*.test.yml"))
RUNBOOK = (MONITORING / "RUNBOOK.md").read_text()


def rules() -> list[dict]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> subprocess.CompletedProcess:
    program = shutil.which("promtool")
    assert program, "promtool is missing: install the package prometheus"
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def cases() -> list[tuple[str, bool]]:
    """Returns the alert of each case and whether the case expects the alert to fire."""
    return [
        (check["alertname"], bool(check["exp_alerts"]))
        for path in CASES
        for test in yaml.safe_load(path.read_text())["tests"]
        for check in test["alert_rule_test"]
    ]


def test_rules_and_the_example_are_valid() -> None:
    for check in (("rules", RULES), ("config", RULES.parent / "prometheus.yml")):
        result = promtool("check", *check)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_alerts_fire_and_stay_silent_as_their_cases_say(path) -> None:
    result = promtool("test", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_case_that_fires_and_one_that_is_silent(alert) -> None:
    assert (alert, True) in cases()
    assert (alert, False) in cases()


def test_a_case_is_called_what_it_shows() -> None:
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            (check,) = test["alert_rule_test"]
            verb = "fires" if check["exp_alerts"] else "stays silent"
            assert test["name"].startswith(f"{check['alertname']} {verb} "), test["name"]


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert) -> None:
    rule = ALERTS[alert]
    assert re.fullmatch(r"Logprobd[A-Z]\w+", alert)
    assert rule["labels"]["severity"] in ("page", "warning", "info")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
    assert rule["annotations"]["runbook_url"].endswith(f"/RUNBOOK.md#{alert.lower()}")
    entry = re.search(rf"^## {alert}\n(.*?)(?=^## |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE)
    assert entry, "RUNBOOK.md has no entry for this alert"
    for part in ("Means", "Look at", "Do"):
        assert f"* **{part}**: " in entry[1], part


def test_the_runbook_has_no_entry_for_an_alert_that_is_gone() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == list(ALERTS)


def test_rules_panels_and_the_status_page_agree_on_faults_and_refusals() -> None:
    text = RULES.read_text()
    page = (ROOT / "server" / "app" / "run" / "status.cc").read_text()

    def on_the_page(name: str) -> list[str]:
        return re.findall(r'"(\w+)"', re.search(rf"{name}\[\] = \{{(.*?)\}}", page, re.DOTALL)[1])

    assert re.findall(r'code=~"([^"]+)"', text) == [promql.FAULTS]
    assert on_the_page("kFaults") == promql.FAULTS.split("|")
    assert re.findall(r'reason=~"(queue[^"]+)"', text) == ["|".join(on_the_page("kRefusals"))]


def test_recording_rules_are_named_by_level_metric_and_operations() -> None:
    names = [rule["record"] for rule in rules() if "record" in rule]
    assert names
    for name in names:
        assert re.fullmatch(r"job(_\w+)?:logprobd_\w+:\w+", name), name
