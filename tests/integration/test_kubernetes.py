"""Compares the Kubernetes manifests with schemas and with the server's settings, ports and metrics."""

import copy
import functools
import json
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import time

import grpc
import jsonschema
import kubernetes_validate
import logprobd
import numpy as np
import pytest
import yaml
from metrics_fixture import MetricsFixture
from network_security import NetworkSecurity
from prometheus_server import PrometheusServer
from scoring_rpc import ROOT, Scoring, request
from server_process import ServerProcess

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is missing: install kubernetes-client"
)

KUBERNETES = ROOT / "deploy" / "kubernetes"
MONITORING = ROOT / "deploy" / "monitoring"
SCHEMAS = pathlib.Path(__file__).with_name("kubernetes_schemas")
FOLDERS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in (ROOT / "deploy").glob("**/kustomization.yaml")
)
SERVERS = [folder for folder in FOLDERS if "/overlays/" in folder or folder.endswith("/base")]
# gRPC probes are stable since 1.27, the oldest version that deploy/kubernetes/README.md names.
VERSIONS = ["1.27", kubernetes_validate.latest_version()]
TLS = "deploy/kubernetes/overlays/tls"
OURS = {"app.kubernetes.io/name": "logprobd"}
DRAIN_ENDS_SECONDS = 10  # for the end of the process after its grace time
APPLY_BYTES_MAX = 262_144  # of the annotation in which `kubectl apply` keeps a manifest


@functools.cache
def text_of(folder: str) -> str:
    result = subprocess.run(
        ["kubectl", "kustomize", ROOT / folder], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def manifests(folder: str) -> list[dict]:
    return list(yaml.safe_load_all(text_of(folder)))


def one(folder: str, kind: str) -> dict:
    (found,) = [manifest for manifest in manifests(folder) if manifest["kind"] == kind]
    return found


def prometheus_rule() -> dict:
    script = KUBERNETES / "monitoring" / "prometheus_rule.sh"
    result = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    return yaml.safe_load(result.stdout)


def pod_of(folder: str) -> dict:
    """Returns the specification of the folder's server pod."""
    return one(folder, "Deployment")["spec"]["template"]["spec"]


def container_of(folder: str) -> dict:
    (container,) = pod_of(folder)["containers"]
    return container


def settings_of(folder: str) -> dict[str, str]:
    return one(folder, "ConfigMap")["data"]


def port_numbers(folder: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(folder)["ports"]}


def asking_of(probe: dict) -> dict:
    """Returns the part of a probe that says what it asks."""
    return {kind: probe[kind] for kind in ("grpc", "httpGet", "exec", "tcpSocket") if kind in probe}


def validate(manifest: dict, version: str) -> None:
    """Raises a ValidationError if the manifest has a wrong or an unknown field."""
    own = SCHEMAS / f"{manifest['kind'].lower()}.json"
    if own.exists():
        jsonschema.Draft202012Validator(json.loads(own.read_text())).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_every_manifest_of_the_folder_is_built() -> None:
    sources = {path for path in KUBERNETES.glob("**/*.yaml") if path.name != "kustomization.yaml"}
    sources -= {KUBERNETES / "autoscaling" / "hpa" / "adapter-rules.yaml"}  # not a manifest
    named = {
        path.parent / name
        for path in KUBERNETES.glob("**/kustomization.yaml")
        for key in ("resources", "patchesStrategicMerge", "patchesJson6902")
        for each in yaml.safe_load(path.read_text()).get(key, [])
        for name in [each["path"] if isinstance(each, dict) else each]
    }
    assert sources == named
    assert len(SERVERS) == 6, SERVERS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_keep_their_schemas(folder: str, version: str) -> None:
    assert manifests(folder)
    for manifest in manifests(folder):
        validate(manifest, version)
        assert len(json.dumps(manifest)) < APPLY_BYTES_MAX, manifest["kind"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "folder, kind, path",
    [
        ("base", "Deployment", ["template", "spec", "containers", 0, "readinessProbe", "grpc"]),
        ("base", "NetworkPolicy", ["ingress", 0]),
        ("base", "PodDisruptionBudget", []),
        ("autoscaling/hpa", "HorizontalPodAutoscaler", ["metrics", 0, "pods"]),
        ("autoscaling/keda", "ScaledObject", ["triggers", 0, "metadata"]),
        ("monitoring", "PodMonitor", ["podMetricsEndpoints", 0]),
        ("monitoring-tls", "PodMonitor", ["podMetricsEndpoints", 0, "tlsConfig", "ca", "secret"]),
    ],
)
def test_the_schemas_find_an_unknown_field(folder: str, kind: str, path: list, version: str):
    broken = copy.deepcopy(one(f"deploy/kubernetes/{folder}", kind))
    functools.reduce(lambda node, key: node[key], path, broken["spec"])["unknownField"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="unknownField"):
        validate(broken, version)


def test_the_readme_s_overlay_is_built(tmp_path) -> None:
    text = (KUBERNETES / "README.md").read_text()
    overlay = re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    here = os.path.relpath(ROOT, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../logprobd", here))
    folder = str(tmp_path)
    assert container_of(folder)["image"].startswith("REGISTRY/logprobd:")
    for version in VERSIONS:
        for manifest in manifests(folder):
            validate(manifest, version)
    added = {"LOGPROBD_MODEL": "/models/step-200", "LOGPROBD_WEIGHTS_VERSION": "2"}
    assert settings_of(folder) == settings_of("deploy/kubernetes/overlays/gpu-1") | added


def test_rules_and_dashboard_are_those_of_deploy_monitoring() -> None:
    rules = (MONITORING / "prometheus" / "logprobd.rules.yml").read_text()
    dashboard = (MONITORING / "grafana" / "dashboards" / "logprobd.json").read_text()
    validate(prometheus_rule(), VERSIONS[-1])
    assert prometheus_rule()["spec"] == yaml.safe_load(rules)
    assert one("deploy/monitoring/prometheus", "ConfigMap")["data"] == {"logprobd.rules.yml": rules}
    assert one("deploy/kubernetes/monitoring", "ConfigMap")["data"] == {"logprobd.json": dashboard}


@pytest.mark.parametrize("folder", SERVERS)
def test_the_server_knows_every_setting(binaries, folder: str) -> None:
    server = binaries / "logprobd"
    help_text = subprocess.run([server, "--help"], capture_output=True, text=True).stdout
    known = {
        "LOGPROBD_" + flag.upper().replace("-", "_")
        for flag in re.findall(r"^  --([a-z-]+)", help_text, re.MULTILINE)
    }
    settings = settings_of(folder)
    assert set(settings) <= known
    assert "args" not in container_of(folder) and "env" not in container_of(folder)

    result = subprocess.run(
        [server, "--print-config"], env=settings, capture_output=True, text=True, timeout=20
    )

    assert result.returncode == 0, result.stderr
    for name in settings:
        assert f"  # {name}\n" in result.stdout


def test_variables_that_kubernetes_sets_for_a_service_would_end_the_server(binaries) -> None:
    result = subprocess.run(
        [binaries / "logprobd", "--print-config"],
        env={"LOGPROBD_PORT": "tcp://10.0.0.1:8470"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "LOGPROBD_PORT" in result.stderr
    for folder in SERVERS:
        assert pod_of(folder)["enableServiceLinks"] is False


@pytest.mark.parametrize("folder", SERVERS)
def test_names_and_ports_agree(folder: str) -> None:
    ports = port_numbers(folder)
    settings, pod, container = settings_of(folder), pod_of(folder), container_of(folder)
    assert settings["LOGPROBD_LISTEN"] == f"0.0.0.0:{ports['grpc']}"
    scheme = "https://" if folder == TLS else ""
    assert settings["LOGPROBD_HTTP"] == f"{scheme}0.0.0.0:{ports['http']}"
    for name in ("readiness", "startup", "liveness"):
        if "httpGet" in container[f"{name}Probe"]:
            asked = container[f"{name}Probe"]["httpGet"].get("scheme", "HTTP")
            assert asked == ("HTTPS" if folder == TLS else "HTTP"), name

    for name in ("readiness", "startup"):
        ((kind, probe),) = asking_of(container[f"{name}Probe"]).items()
        assert (kind, probe["port"]) == (
            ("httpGet", "http") if folder == TLS else ("grpc", ports["grpc"])
        )
    assert container["livenessProbe"]["httpGet"]["port"] in ports
    (service_port,) = one(folder, "Service")["spec"]["ports"]
    assert ports[service_port["targetPort"]] == service_port["port"] == ports["grpc"]
    policy = one(folder, "NetworkPolicy")["spec"]
    opened = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert opened == [ports["grpc"], ports["http"]]
    monitor = one("deploy/kubernetes/monitoring", "PodMonitor")["spec"]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["http"]

    deployment = one(folder, "Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"] == OURS
    budget = one(folder, "PodDisruptionBudget")["spec"]
    spreads = [spread["labelSelector"] for spread in pod["topologySpreadConstraints"]]
    selectors = [deployment["spec"]["selector"], policy["podSelector"], monitor["selector"]]
    for selector in (*selectors, budget["selector"], *spreads):
        assert selector == {"matchLabels": OURS}
    assert one(folder, "Service")["spec"]["selector"] == OURS
    assert one(folder, "Service")["spec"]["clusterIP"] == "None"
    assert monitor["jobLabel"] in OURS

    assert container["envFrom"] == [
        {"configMapRef": {"name": one(folder, "ConfigMap")["metadata"]["name"]}}
    ]
    assert pod["serviceAccountName"] == one(folder, "ServiceAccount")["metadata"]["name"]
    name = deployment["metadata"]["name"]
    scaled = one("deploy/kubernetes/autoscaling/hpa", "HorizontalPodAutoscaler")["spec"]
    assert scaled["scaleTargetRef"]["name"] == name
    scaled = one("deploy/kubernetes/autoscaling/keda", "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == name


@pytest.mark.parametrize("folder", SERVERS)
def test_folders_of_the_settings_are_mounted(folder: str) -> None:
    pod, container, settings = pod_of(folder), container_of(folder), settings_of(folder)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert sorted(mount["name"] for mount in mounts.values()) == sorted(volumes)

    claim = one(folder, "PersistentVolumeClaim")["metadata"]["name"]
    assert volumes[mounts["/models"]["name"]]["persistentVolumeClaim"]["claimName"] == claim
    assert mounts["/models"]["readOnly"]
    for model in settings["LOGPROBD_MODEL"].split(","):
        assert model.rpartition("=")[2].startswith("/models/")
    for path in (settings["LOGPROBD_STATE_DIR"], "/tmp"):
        assert "emptyDir" in volumes[mounts[path]["name"]]
    copy_pod = one("deploy/kubernetes/model-copy", "Pod")["spec"]
    assert copy_pod["volumes"] == [volumes["models"]]


def test_certificate_and_tokens_come_from_secrets_that_no_manifest_contains() -> None:
    pod, mounts = pod_of(TLS), container_of(TLS)["volumeMounts"]
    secrets = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    mounted = {
        mount["mountPath"]: secrets[mount["name"]] for mount in mounts if mount["name"] in secrets
    }
    files = {
        name: pathlib.PurePath(settings_of(TLS)[f"LOGPROBD_{name}"])
        for name in ("TLS_CERT", "TLS_KEY", "TOKENS")
    }

    # Keys of a Secret are the names of its files; those of the first are Kubernetes' for a certificate.
    assert {
        name: (mounted[str(path.parent)]["secretName"], path.name) for name, path in files.items()
    } == {
        "TLS_CERT": ("logprobd-tls", "tls.crt"),
        "TLS_KEY": ("logprobd-tls", "tls.key"),
        "TOKENS": ("logprobd-tokens", "tokens.toml"),
    }
    assert all(secret["defaultMode"] == 0o440 for secret in secrets.values())
    assert all(mount["readOnly"] for mount in mounts if mount["name"] in secrets)
    for folder in FOLDERS:
        assert not [each for each in manifests(folder) if each["kind"] == "Secret"]


@pytest.mark.parametrize("with_client_certificates", [False, True])
def test_probes_succeed_with_tls_and_tokens(
    binaries, model, tmp_path, with_client_certificates: bool
) -> None:
    # The certificate contains the name of the Service, whatever address of a pod is called.
    security = NetworkSecurity(tmp_path, hosts="DNS:logprobd.scoring")
    container, ports = container_of(TLS), port_numbers(TLS)
    settings = settings_of(TLS) | {
        "LOGPROBD_MODEL": str(model.path),
        "LOGPROBD_DEVICE": "cpu",
        "LOGPROBD_STATE_DIR": str(tmp_path),
        "LOGPROBD_LOG_FORMAT": "text",  # ServerProcess reads the log
        "LOGPROBD_TLS_CERT": str(security.server_cert),
        "LOGPROBD_TLS_KEY": str(security.server_key),
        "LOGPROBD_TOKENS": str(security.tokens.path),
    }
    if with_client_certificates:
        settings["LOGPROBD_TLS_CLIENT_CA"] = str(security.ca)
    assert settings["LOGPROBD_INSECURE"] == "false"
    listen = ("--listen", "0.0.0.0:0", "--http", "https://0.0.0.0:0")
    with ServerProcess(binaries, *listen, environment=settings) as server:
        for name in ("startup", "readiness", "liveness"):
            ask = container[f"{name}Probe"]["httpGet"]
            assert ports[ask["port"]] == ports["http"]
            assert ask["scheme"] == "HTTPS"
            assert server.get(ask["path"])[0] == 200, name
        address = f"127.0.0.1:{server.grpc.rpartition(':')[2]}"
        certificate = {"cert": security.client_cert, "key": security.client_key}
        tls = logprobd.Tls(
            ca=security.ca,
            server_name="logprobd.scoring",
            **(certificate if with_client_certificates else {}),
        )
        hidden = np.ones((2, model.weight.shape[1]), np.float32)
        with logprobd.Client(address, tls=tls, token=security.token, timeout=20) as client:
            assert len(client.score(hidden, [1, 2]).logprob) == 2
        with logprobd.Client(address, tls=tls, timeout=20) as client:
            with pytest.raises(logprobd.LogprobdError, match="needs a token"):
                client.score(hidden, [1, 2])


def test_the_server_of_the_tls_overlay_does_not_start_without_tokens_or_tls(
    binaries, model, tmp_path
) -> None:
    security = NetworkSecurity(tmp_path)
    settings = settings_of(TLS) | {
        "LOGPROBD_MODEL": str(model.path),
        "LOGPROBD_DEVICE": "cpu",
        "LOGPROBD_STATE_DIR": str(tmp_path),
        "LOGPROBD_TLS_CERT": str(security.server_cert),
        "LOGPROBD_TLS_KEY": str(security.server_key),
        "LOGPROBD_TOKENS": str(security.tokens.path),
    }
    for missing, reason in (
        (["LOGPROBD_TOKENS"], "without authentication over TLS"),
        (["LOGPROBD_TLS_CERT", "LOGPROBD_TLS_KEY"], "tokens would cross the network unencrypted"),
    ):
        result = subprocess.run(
            [binaries / "logprobd"],
            env={name: value for name, value in settings.items() if name not in missing},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 2, missing
        assert reason in result.stderr, result.stderr


def test_prometheus_scrapes_the_tls_overlay_as_its_pod_monitor_says(
    start_server, model, tmp_path
) -> None:
    # The certificate contains the name of the Service, whatever address of a pod is scraped.
    security = NetworkSecurity(tmp_path, hosts="DNS:logprobd.scoring")
    (endpoint,) = one("deploy/kubernetes/monitoring-tls", "PodMonitor")["spec"][
        "podMetricsEndpoints"
    ]
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "logprobd-tls", "key": "ca.crt"}
    assert endpoint["authorization"] == {
        "credentials": {"name": "logprobd-metrics", "key": "token"}
    }
    (tmp_path / "scrape-token").write_text(security.metrics_token)
    server = start_server(
        *("--model", str(model.path), "--http", "https://127.0.0.1:0"),
        *security.server_flags(),
    )
    rules = MONITORING / "prometheus" / "logprobd.rules.yml"
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with PrometheusServer(
        folder,
        {"logprobd": [server.http.removeprefix("https://")]},
        rules,
        scheme=endpoint["scheme"],
        tls_config={
            "ca_file": str(security.ca),
            "server_name": endpoint["tlsConfig"]["serverName"],
        },
        authorization={"credentials_file": str(tmp_path / "scrape-token")},
    ) as prometheus:
        assert prometheus.wait_for_values("up", 20, above_zero=True) == [1]


def test_a_changed_secret_is_served_without_a_restart(start_server, model, tmp_path) -> None:
    security = NetworkSecurity(tmp_path)
    mounted = tmp_path / "mounted"
    mounted.mkdir()

    def update(number: int) -> str:
        """Replaces all files at once as the kubelet does, and returns the new certificate."""
        cert, key = security.authority.issue(f"serving-{number}")
        version = mounted / f"..{number}"
        version.mkdir()
        shutil.copy(cert, version / "tls.crt")
        shutil.copy(key, version / "tls.key")
        (mounted / "..new").symlink_to(version.name)
        (mounted / "..new").rename(mounted / "..data")
        return cert.read_text()

    first = update(1)
    for name in ("tls.crt", "tls.key"):
        (mounted / name).symlink_to(f"..data/{name}")
    server = start_server(
        *("--model", str(model.path), "--tls-cert", str(mounted / "tls.crt")),
        *("--tls-key", str(mounted / "tls.key"), "--http", "https://127.0.0.1:0"),
    )

    def are_served(cert: str) -> bool:
        return all(
            ssl.get_server_certificate(("127.0.0.1", int(port)), timeout=20) == cert
            for port in (server.grpc.rpartition(":")[2], server.http.rpartition(":")[2])
        )

    assert are_served(first)

    second = update(2)

    assert server.eventually(lambda: are_served(second), seconds=30)


@pytest.mark.parametrize("folder", SERVERS)
def test_a_pod_is_stopped_after_its_drain_and_has_time_to_load(folder: str) -> None:
    pod, startup = pod_of(folder), container_of(folder)["startupProbe"]
    grace = float(settings_of(folder)["LOGPROBD_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] >= grace + DRAIN_ENDS_SECONDS
    loading = startup["periodSeconds"] * startup["failureThreshold"]
    assert loading >= 1800
    assert one(folder, "Deployment")["spec"]["progressDeadlineSeconds"] > loading


@pytest.mark.parametrize("folder", [*SERVERS, "deploy/kubernetes/model-copy"])
def test_pods_keep_the_restricted_pod_security_standard(folder: str) -> None:
    pod = pod_of(folder) if folder in SERVERS else one(folder, "Pod")["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("folder", [*SERVERS, "deploy/kubernetes/model-copy"])
def test_the_image_has_the_version_of_the_server(binaries, folder: str) -> None:
    pod = pod_of(folder) if folder in SERVERS else one(folder, "Pod")["spec"]
    printed = subprocess.run([binaries / "logprobd", "--version"], capture_output=True, text=True)
    version = printed.stdout.split()[1]
    uses_gpus = "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
    assert pod["containers"][0]["image"] == f"logprobd:{version}" + ("-cuda" if uses_gpus else "")


@pytest.mark.parametrize("folder", SERVERS)
def test_gpus_are_requested_where_they_are_used(folder: str) -> None:
    settings, limits = settings_of(folder), container_of(folder)["resources"]["limits"]
    gpus = int(limits.get("nvidia.com/gpu", 0))
    assert (gpus > 0) == (settings.get("LOGPROBD_DEVICE") == "cuda")
    assert int(settings.get("LOGPROBD_SHARDS", 1)) == max(gpus, 1)


def test_probes_succeed_while_the_server_refuses_requests(binaries, slow_model, tmp_path) -> None:
    folder = "deploy/kubernetes/overlays/cpu"
    container = container_of(folder)
    ports = port_numbers(folder)
    settings = settings_of(folder) | {
        "LOGPROBD_MODEL": str(slow_model.path),
        "LOGPROBD_STATE_DIR": str(tmp_path),
        "LOGPROBD_LOG_FORMAT": "text",  # ServerProcess reads the log
        "LOGPROBD_QUEUE_ROWS": "6000",
        "LOGPROBD_CLIENT_SHARE": "1",
    }
    with ServerProcess(binaries, environment=settings) as server:
        with Scoring(server.grpc) as scoring:
            data = request(rows=300, hidden_size=256).SerializeToString()
            load = [scoring.score_future(data) for _ in range(100)]
            probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
            for probe in probes:
                if "grpc" in probe:
                    service = probe["grpc"]["service"]
                    assert scoring.health(service, timeout=probe["timeoutSeconds"]) == 1
                else:
                    assert ports[probe["httpGet"]["port"]] == ports["http"]
                    path = probe["httpGet"]["path"]
                    assert server.get(path, timeout=probe["timeoutSeconds"])[0] == 200
            assert any(not future.done() for future in load), "the load ended before the probes"
            codes = {future.code() for future in load}
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_a_pod_monitor_leaves_the_labels_that_the_rules_expect() -> None:
    (endpoint,) = one("deploy/kubernetes/monitoring", "PodMonitor")["spec"]["podMetricsEndpoints"]
    # The operator gives these labels to a target before it applies `relabelings`.
    labels = {"namespace", "container", "pod", "job", "endpoint", "instance"}
    rename, drop = endpoint["relabelings"]
    assert rename == {"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}
    assert drop["action"] == "labeldrop"
    left = {label for label in labels if not re.fullmatch(drop["regex"], label)}
    assert left == {"namespace", "job", "instance"}


def autoscaling_queries() -> list[tuple[str, str]]:
    """Returns the names and the queries of the metrics of both autoscalers, for a Prometheus of a few seconds."""
    triggers = one("deploy/kubernetes/autoscaling/keda", "ScaledObject")["spec"]["triggers"]
    queries = [(trigger["name"], trigger["metadata"]["query"]) for trigger in triggers]
    rules = yaml.safe_load((KUBERNETES / "autoscaling/hpa/adapter-rules.yaml").read_text())
    for rule in rules["rules"]:
        series = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", 'instance=~".+"')
        name = rule.get("name", {}).get("as", series)
        queries.append((name, query.replace("<<.GroupBy>>", "instance")))
    return [(name, query.replace("[2m]", "[2s]")) for name, query in queries]


def wait_for_value(prometheus: PrometheusServer, query: str, expected: float) -> float:
    """Returns the only value of a query once it is near `expected`, or after 30 s."""
    end = time.monotonic() + 30
    while True:
        (value,) = prometheus.wait_for_values(query, 30, above_zero=True)
        if 0.5 * expected < value < 1.5 * expected or time.monotonic() > end:
            return value
        time.sleep(0.1)


def test_autoscalers_query_metrics_that_are_served(binaries, tmp_path) -> None:
    queries = autoscaling_queries()
    scaler = one("deploy/kubernetes/autoscaling/hpa", "HorizontalPodAutoscaler")["spec"]
    used = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert used <= {name for name, _ in queries}

    rules = MONITORING / "prometheus" / "logprobd.rules.yml"
    with MetricsFixture(binaries) as fixture:
        served = set(re.findall(r"^# TYPE (\S+)", fixture.metrics(), re.MULTILINE))
        with PrometheusServer(tmp_path, {"logprobd": [fixture.http]}, rules) as prometheus:
            for name, query in queries:
                assert set(re.findall(r"logprobd_\w+", query)) <= served, name
                # The fixture's GPUs are busy for nine tenths of the time, and its oldest request waits for 4 ms.
                expected = 0.9 if "gpu" in name else 0.004
                value = wait_for_value(prometheus, query, expected)
                assert value == pytest.approx(expected, rel=0.5), name


def test_both_autoscalers_have_the_same_bounds() -> None:
    pods = one("deploy/kubernetes/autoscaling/hpa", "HorizontalPodAutoscaler")["spec"]
    keda = one("deploy/kubernetes/autoscaling/keda", "ScaledObject")["spec"]
    targets = [metric["pods"]["target"]["averageValue"] for metric in pods["metrics"]]
    assert targets == ["700m", "2"]
    assert [trigger["metadata"]["threshold"] for trigger in keda["triggers"]] == ["0.7", "2"]
    assert pods["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert pods["minReplicas"] == keda["minReplicaCount"]
    assert pods["maxReplicas"] == keda["maxReplicaCount"]
