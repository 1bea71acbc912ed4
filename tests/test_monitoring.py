"""The dashboard and the alert rules name series that a fleet exports, with labels that they have."""

import json
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.http.prometheus import exposition
from deployments.router.scrape import Scraped
from deployments.serve.instruments import OWN
from tests.app.http.fake_status import report, status
from tests.test_architecture import anchors

ROOT = Path(__file__).parents[1]
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "slipstream.json").read_text())
PROMTOOL = shutil.which("promtool")
GRAFANAS = {"$__rate_interval": "1m", "$job": "slipstream"}  # variables
_SELECTOR = re.compile(r"\b((?:slipstream|vllm:|ray_)\w+)(?:\{([^}]*)\})?")
PANELS = {f"panel: {panel['title']}": panel["targets"] for panel in DASHBOARD["panels"]}
EXPRESSIONS = {
    **{f"{title} {each['refId']}": each["expr"] for title, targets in PANELS.items() for each in targets},
    **{f"alert: {rule['alert']}": rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]},
}


def vllm() -> Path:
    """Its package, which takes seconds to import."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@cache
def exported() -> set[str]:
    """The names of all series of a fleet."""
    nodes = {"node": ""}
    text = exposition(status(3, ["r0"]), [report(1, 3)], Scraped(replicas={"r0": ""}, nodes=nodes))
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    names |= {series for metric in OWN for series in metric.series}
    of_vllm = re.findall(r'name="(vllm:\w+)"', (vllm() / "v1" / "metrics" / "loggers.py").read_text())
    suffixes = ("", "_total", "_bucket", "_count", "_sum")
    return names | {f"{name}{suffix}" for name in of_vllm for suffix in suffixes}


def test_expressions_name_series_that_a_fleet_exports() -> None:
    for name, expression in EXPRESSIONS.items():
        named = {found[1] for found in _SELECTOR.finditer(expression)}
        assert named and named - exported() == set(), name


def test_our_own_counts_are_selected_by_labels_that_they_have() -> None:
    own = {series: {*metric.labels, "le", "job", "process"} for metric in OWN for series in metric.series}
    for name, expression in EXPRESSIONS.items():
        for found in _SELECTOR.finditer(expression):
            selected = set(re.findall(r"(\w+)(?:=~|!=|!~|=)", found[2] or ""))
            assert selected <= own.get(found[1], selected), name


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: apt-get install prometheus")
def test_prometheus_reads_the_configuration_the_alerts_and_each_expression(tmp_path: Path) -> None:
    expressions = EXPRESSIONS.values()
    for variable, value in GRAFANAS.items():
        expressions = [each.replace(variable, value) for each in expressions]
    rules = [{"record": "a", "labels": {"n": str(n)}, "expr": each} for n, each in enumerate(expressions)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for kind, file in (
        ("config", ROOT / "deploy" / "prometheus" / "prometheus.yaml"),
        ("rules", tmp_path / "rules.yaml"),
    ):
        done = subprocess.run([str(PROMTOOL), "check", kind, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_names_a_part_of_the_runbook_that_exists() -> None:
    titles = anchors(ROOT / "docs" / "operating" / "runbook.md")
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    for rule in rules:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/operating/runbook.md" and anchor in titles
