"""Rules and dashboard ask only for what the server exports: names, labels, and the forms that a type has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy.tools import DEPLOY, passes, services, tool

RULES = DEPLOY / "prometheus" / "rules.yaml"
NAMES = Path(__file__).parents[1] / "server" / "data" / "metrics.json"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
NAME = re.compile(r"\bhalfbyte[_:][\w:]*")
OTHERS = {"instance", "job"}  # labels that Prometheus adds
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> dict[str, set[str]]:
    """Every series of the committed list, with its labels; tests/server/test_metrics.py holds the server to it."""
    found: dict[str, set[str]] = {}
    for name, metric in json.loads(NAMES.read_text()).items():
        for suffix in SUFFIXES[metric["type"]]:
            labels = {*metric["labels"], *(["le"] if suffix == "_bucket" else [])}
            found[f"{name}{suffix}"] = labels
    return found


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def known() -> dict[str, set[str]]:
    recorded = {rule["record"]: set(re.findall(r"\w+", (re.search(r"by \(([^)]*)\)", rule["expr"]) or ["", ""])[1]))
                for rule in rules() if "record" in rule}  # fmt: skip
    return exported() | recorded


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def wrong(expression: str, series: dict[str, set[str]]) -> Iterator[str]:
    names = NAME.findall(expression)
    yield from (name for name in names if name not in series)
    labels = set().union(*(series.get(name, set()) for name in names), OTHERS)
    used = [label for part in re.findall(r"\b(?:by|on|without) \(([^)]*)\)", expression) for label in part.split(",")]
    used += [pair.split("=")[0] for part in re.findall(r"\{([^}]*)\}", expression) for pair in part.split(",")]
    yield from (label for label in (re.sub(r"\W", "", u) for u in used) if label and label not in labels)


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda text: text[:40])
def test_only_what_is_exported_is_asked_for(where: str, expression: str) -> None:
    assert not list(wrong(expression, known()))


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda text: text[:40])
def test_every_expression_is_promql(where: str, expression: str) -> None:
    """With its types; Grafana's own intervals stand for some duration."""
    promql_parser.parse(re.sub(r"\$__\w+", "1m", expression))


def test_what_is_not_promql_is_noticed() -> None:
    for expression in ("sum by (a (halfbyte_ready)", "rate(halfbyte_ready)", "halfbyte_ready[5m] > 1"):
        with pytest.raises(ValueError):
            promql_parser.parse(expression)


def test_what_is_not_exported_is_noticed() -> None:
    assert list(wrong("rate(halfbyte_engine_steps[1m])", known())) == ["halfbyte_engine_steps"]  # a counter has _total
    assert list(wrong('halfbyte_requests_refused_total{why="x"}', known())) == ["why"]
    assert list(wrong("sum by (colour) (halfbyte_ready)", known())) == ["colour"]
    assert not list(wrong('sum by (reason) (halfbyte_requests_refused_total{instance="a"})', known()))


def test_the_dashboard_can_be_provisioned() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"] == "halfbyte"
    assert {t["datasource"]["uid"] for p in board["panels"] for t in p.get("targets", [])} == {"halfbyte"}
    assert yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"][0]["uid"] == "halfbyte"
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(places) == len(set(places))


def test_what_one_file_names_another_one_mounts() -> None:
    """Prometheus' configuration, Grafana's provisioning and compose.production.yaml know each other by names alone."""
    found = services(DEPLOY / "compose.production.yaml")
    mounts = {}
    for name in ("prometheus", "grafana"):
        for mount in found[name]["volumes"]:
            source, target = mount.removesuffix(":ro").split(":")
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
                mounts[target] = DEPLOY / source

    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    for named in [*config["rule_files"], found["prometheus"]["command"][0].partition("=")[2]]:
        assert (mounts["/etc/prometheus"] / Path(named).relative_to("/etc/prometheus")).is_file()
    (job,) = config["scrape_configs"]
    assert Path(job["authorization"]["credentials_file"]).name in found["prometheus"]["secrets"]
    for target in job["static_configs"][0]["targets"]:
        host, port = target.split(":")
        assert any(mapping.endswith(f":{port}") for mapping in found[host]["ports"])
        assert f"--allow-host={host}" in found[host]["command"]

    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert mounts[f"{provider['options']['path']}/dashboard.json"] == DASHBOARD
    home = found["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts[home] == DASHBOARD
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(mapping.endswith(f":{port}") for mapping in found[host]["ports"])


def test_every_alert_says_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for rule in alerts:
        assert {"summary", "description"} <= set(rule["annotations"])  # type: ignore[arg-type]


def test_promtool() -> None:
    promtool = tool("promtool", "Debian's prometheus")
    passes([promtool, "check", "rules", RULES])
    passes([promtool, "check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yaml"])
    passes([promtool, "test", "rules", DEPLOY / "prometheus" / "rules.test.yaml"])
