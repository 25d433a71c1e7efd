"""The files that deploy a server: flags, routes, ports and metrics in them are those of the server."""

import dataclasses
import json
import re
import shlex
from types import SimpleNamespace

import pytest
from paths import ROOT

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
pytest.importorskip("yaml", reason="these files are YAML: pip install pyyaml")
import yaml
from soak import server_requests

from xinfer_jax.cli.commands import COMMANDS
from xinfer_jax.engine.statistics import EngineStats
from xinfer_jax.serve import app, command
from xinfer_jax.serve.metrics import Metrics
from xinfer_jax.serve.service import Service

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

FOLDER = ROOT / "xinfer_jax" / "serve" / "deployment"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
DEPLOYMENT, SERVICE = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
GRACE = command.PARSER.values["grace"].default


def routes() -> dict[str, set[str]]:
    """The methods of each route of the server."""
    server = app.make_server(Service(server_requests.SETTINGS, print))
    return {route.path: route.methods for route in server.config.app.routes}


def docker_list(instruction: str) -> list[str]:
    (found,) = re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.M)
    return json.loads(found)


def check_command(arguments: list[str]) -> dict[str, str]:
    """Checks a command line of `xinfer-jax`; its flags."""
    assert arguments[0] in COMMANDS
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments[1:])
    command.PARSER.parse(["xinfer-jax serve", *arguments[1:]])  # raises InputError
    assert flags["host"] not in ("127.0.0.1", "localhost")  # others can reach the container
    return flags


def test_the_image_copies_files_that_exist_and_starts_the_server():
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M):
        assert all((ROOT / name).exists() and f"!{name}" in sent for name in shlex.split(line))
    assert docker_list("ENTRYPOINT") == ["xinfer-jax"]
    flags = check_command(docker_list("CMD"))
    assert f"EXPOSE {flags['port']}\n" in DOCKERFILE
    extras = re.search(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.M)[1].split(",")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in (*extras, *re.search(r"EXTRAS=(\S+),", DOCKERFILE)[1].split(",")):
        assert re.search(rf"^{extra} = \[", pyproject, re.M), extra


def test_health_checks_ask_a_route_that_needs_no_key():
    health = re.search(r"http://127.0.0.1:(\d+)(/\w+)", DOCKERFILE)
    assert "GET" in routes()[health[2]] and health[1] == "8000"
    probes = [CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    for probe in probes:
        assert probe["httpGet"] == dict(path=health[2], port="http")
    assert health[2] in app._OPEN_PATHS


def test_compose_gives_flags_of_the_server():
    server = COMPOSE["services"]["server"]
    flags = check_command(server["command"])
    assert server["ports"] == [f"8000:{flags['port']}"]
    assert (FOLDER / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    assert command._KEY_VARIABLE in server["environment"]
    assert int(server["stop_grace_period"].removesuffix("s")) > int(flags["grace"]) + command._CLOSE_SECONDS
    (scrape,) = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == [f"server:{flags['port']}"]
    assert scrape.get("metrics_path", "/metrics") in routes()
    for name in ("datasource", "dashboards"):
        assert yaml.safe_load(COMPOSE["configs"][name]["content"])["apiVersion"] == 1
    assert (FOLDER / COMPOSE["configs"]["dashboard"]["file"]).is_file()
    named = {use["source"] for part in COMPOSE["services"].values() for use in part.get("configs", ())}
    assert named == {*COMPOSE["configs"]}


def test_kubernetes_gives_flags_of_the_server():
    flags = check_command(CONTAINER["args"])
    (port,) = CONTAINER["ports"]
    assert port == dict(name="http", containerPort=int(flags["port"]))
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in routes()
    assert annotations["prometheus.io/port"] == flags["port"]
    (variable,) = CONTAINER["env"]
    assert variable["name"] == command._KEY_VARIABLE
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    most = wait + int(flags["grace"]) + command._CLOSE_SECONDS
    assert POD["terminationGracePeriodSeconds"] > most
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert labels == DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == port["name"]
    (mount,) = CONTAINER["volumeMounts"]
    assert f"XDG_CACHE_HOME={mount['mountPath']} " in DOCKERFILE
    assert POD["securityContext"]["runAsUser"] == int(re.search(r"^USER (\d+)$", DOCKERFILE, re.M)[1])


def exported_names() -> set[str]:
    """The names of all series that /metrics has."""
    fields = dataclasses.fields(EngineStats)
    stats = EngineStats(**{field.name: [0] if "list[int]" in str(field.type) else 0 for field in fields})
    metrics = Metrics("model")
    metrics.watch(SimpleNamespace(stats=stats, version=0))
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", metrics.text().decode(), re.M):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def test_the_dashboard_shows_metrics_that_the_server_exports():
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for text in expressions for name in re.findall(r"vllm:\w+", text)}
    exported = exported_names()
    assert shown <= exported
    # And the other way: each metric has a panel.
    parts = r"_(bucket|sum|count|created)$"
    assert {re.sub(parts, "", name) for name in exported if not name.endswith("_created")} == {
        re.sub(parts, "", name) for name in shown
    }
    assert all("model_name=~" in text for text in expressions)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["description"] and panel["title"] for panel in dashboard["panels"])


def test_the_readme_names_flags_and_files_that_exist():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    flags = {*re.findall(r"`--([a-z]+(?:_[a-z]+)+|grace)", text)}
    assert {"stuck_seconds", "trusted_proxy", "api_key_file", "grace"} <= flags <= {*command.PARSER.values}
    assert f"`--grace` seconds ({GRACE})" in text
    for path in re.findall(r"xinfer_jax/serve/deployment/[\w.]+", text):
        assert (ROOT / path).is_file()


def test_the_readme_has_alerts_and_metrics_that_the_server_exports():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (group,) = yaml.safe_load(block)["groups"]
    assert all({"alert", "expr"} <= rule.keys() <= {"alert", "expr", "for"} for rule in group["rules"])
    exported = exported_names()
    in_rules = {name for rule in group["rules"] for name in re.findall(r"vllm:\w+", rule["expr"])}
    assert in_rules <= exported
    histograms = {name.removesuffix("_count") for name in exported if name.endswith("_count")}
    others = {name for name in exported if not re.search(r"_(bucket|sum|count|created)$", name)}
    assert {"vllm:num_requests_waiting"} < {*re.findall(r"`(vllm:\w+)`", text)} <= histograms | others


def test_the_page_of_the_server_explains_each_status():
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    explained = {*re.findall(r"^\| (\d{3}) \|", text, re.M)}
    code = "".join(file.read_text(encoding="utf-8") for file in FOLDER.parent.glob("*.py"))
    sent = {*re.findall(r"APIError\(\s*(\d{3})", code), *re.findall(r", (4\d\d)\)$", code, re.M)}
    assert {"400", "401", "403", "404", "408", "409", "413", "415", "429", "503"} <= sent <= explained
