"""The status of a run: its form, its receivers, and the manifest of the docs that asks for it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, refusal, reported, run
from helpers import ROOT, need, until

from minidl.training import status
from minidl.training.status import CERTIFICATE, TOKEN, URL, Moment, Status, Target, body

TRAIN = ["train", *SMALL, "--steps", "12"]


def metrics(content: Any) -> dict[str, str]:
    return {m["name"]: m["value"] for m in content["trainerStatus"]["metrics"]}


def well_formed(content: Any) -> None:
    """What trainer 2.2 accepts: whole numbers of 32 bits, at most 256 metrics of at most 64 characters, a time."""
    (told,) = content.values()
    assert set(content) == {"trainerStatus"}
    assert 0 <= told["progressPercentage"] <= 100
    assert 0 <= told["estimatedRemainingSeconds"] < 1 << 31
    assert {type(told[name]) for name in ("progressPercentage", "estimatedRemainingSeconds")} == {int}
    assert 0 < len(told["metrics"]) <= 256
    assert all(set(m) == {"name", "value"} and all(type(v) is str and 0 < len(v) <= 64 for v in m.values())
               for m in told["metrics"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told["lastUpdatedTime"])


def test_any_moment_has_the_form_that_kubeflow_takes() -> None:
    draw = random.Random(0)
    for _ in range(200):
        steps = draw.choice([1, 7, 10**9])
        before, now = sorted(draw.randint(0, steps) for _ in range(2))
        begun = draw.random() * 1e6
        loss = draw.choice([None, 0.23, math.nan, math.inf, 1e-300, 1e300])
        content = body(Moment(now, begun + draw.random() * 1e5, {"lr": 0.1, "epoch": 2.0}), Moment(before, begun, {}),
                       steps, 64, draw.choice([0.0, 1e-6, 1e4]), loss)
        well_formed(json.loads(json.dumps(content, allow_nan=False)))
        assert content["trainerStatus"]["progressPercentage"] == now * 100 // steps


def test_the_remaining_time_is_predicted_first_and_then_measured() -> None:
    first = body(Moment(0, 5.0, {}), Moment(0, 5.0, {}), 100, 8, 0.5, None)
    assert first["trainerStatus"]["estimatedRemainingSeconds"] == 50
    assert metrics(first) == {"step": "0", "steps": "100", "predicted_remaining_s": "50"}
    later = body(Moment(21, 45.0, {}), Moment(1, 5.0, {}), 100, 8, 0.5, 0.25)
    assert later["trainerStatus"]["estimatedRemainingSeconds"] == 158
    assert metrics(later) == {"step": "21", "steps": "100", "loss": "0.25", "predicted_remaining_s": "39.5",
                              "measured_remaining_s": "158", "samples_per_s": "4"}


# ------------------------------------------------------------------------------------------------------------ receivers
def test_a_run_leaves_its_last_status_in_a_file(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    record = reported(capsys, *TRAIN, "--status", str(file))
    content = json.loads(file.read_text())
    well_formed(content)
    assert content["trainerStatus"]["progressPercentage"] == 100
    assert float(metrics(content)["loss"]) == pytest.approx(record["loss_last"], rel=1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("parallel", [["data"], ["pipeline", "--micro-batches", "2"]])
def test_rank_0_alone_writes(capsys: Any, tmp_path: Path, monkeypatch: Any, parallel: list[str]) -> None:
    made, init = list[str](), Status.__init__

    def noted(self: Status, *arguments: Any) -> None:
        made.append(threading.current_thread().name)
        init(self, *arguments)

    monkeypatch.setattr(Status, "__init__", noted)
    file = tmp_path / "status.json"
    assert run(capsys, *TRAIN, "--parallel", *parallel, "--ranks", "2", "--status", str(file))[0] == 0
    assert made == ["rank 0"]
    well_formed(json.loads(file.read_text()))


@pytest.mark.parametrize(("text", "words"), [
    ("https:///x", "is no address"), ("http://host:99999999/", "is no address"), ("ftp://host/x", "is no address"),
    ("https://ho st/", "is no address"), ("https://[::1/", "is no address"), ("kubeflow", f"{URL} is not set"),
    ("/no/such/folder/x", "does not exist"), ("", "the name is empty")])
def test_what_cannot_be_a_receiver_is_refused_in_one_line(capsys: Any, monkeypatch: Any, text: str, words: str) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert words in refusal(capsys, *TRAIN, "--status", text)


def test_a_token_is_sent_over_tls_alone_and_its_files_must_be_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with pytest.raises(ValueError, match="is sent over https alone"):
        Target.of("http://host/x", {TOKEN: str(token)})
    with pytest.raises(ValueError, match="names, cannot be read"):
        Target.of("https://host/x", {TOKEN: str(tmp_path / "none")})
    with pytest.raises(ValueError, match="is sent over https alone"):
        Target.of("kubeflow", {URL: "http://host/x", TOKEN: str(token)})
    assert Target.of("https://host/x", {TOKEN: str(token)}).token == str(token)


@contextmanager
def server(answer: Any, certificate: Path | None = None) -> Iterator[tuple[str, list[Any]]]:
    """A server on this machine: its URL, and what it got, as pairs of headers and content. `answer(handler)`."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            answer(self)

        def do_GET(self) -> None:
            got.append((dict(self.headers), "GET"))

        def log_message(self, *_: Any) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        found.socket = context.wrap_socket(found.socket, server_side=True)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http{'s' * (certificate is not None)}://127.0.0.1:{found.server_port}/status", got
    finally:
        found.shutdown()
        found.server_close()


def says(code: int, **headers: str) -> Any:
    def answer(handler: Any) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def test_a_url_gets_the_first_and_the_last_status(capsys: Any) -> None:
    with server(says(200)) as (url, got):
        code, out, err = run(capsys, *TRAIN, "--status", url)
    assert (code, "not taken" in err) == (0, False)
    for _, content in got:
        well_formed(content)
    assert got[-1][1]["trainerStatus"]["progressPercentage"] == 100
    assert {headers["Content-Type"] for headers, _ in got} == {"application/json"}


@pytest.mark.parametrize("answer", [says(500), says(403), says(302, Location="http://127.0.0.1:9/other")])
def test_a_receiver_that_refuses_is_one_line_and_nothing_follows_a_redirection(capsys: Any, answer: Any) -> None:
    with server(answer) as (url, got):
        code, _, err = run(capsys, *TRAIN, "--status", url)
    assert code == 0
    assert len(re.findall(r"^the status was not taken by .*: HTTP \d+; the run goes on$", err, re.MULTILINE)) == 1
    assert len(got) >= 2
    assert "GET" not in [content for _, content in got]


def test_nobody_there_is_one_line(capsys: Any) -> None:
    code, _, err = run(capsys, *TRAIN, "--status", "http://127.0.0.1:9/x")
    assert (code, err.count("the status was not taken by http://127.0.0.1:9/x")) == (0, 1)


def test_a_receiver_that_never_answers_does_not_hold_up_a_step(monkeypatch: Any) -> None:
    """Steps go on while a request is under way."""
    monkeypatch.setattr(status, "TIMEOUT", 0.3)
    over = threading.Event()
    with server(lambda handler: over.wait(60)) as (url, got):
        warned: list[str] = []
        told = Status(Target.of(url, {}), 1000, 0, 8, 1.0, lambda: None, warned.append)
        until(lambda: got, "a request")
        for step in range(1, 1001):
            told.tell(step, {})
        assert len(got) == 1
        told.close()
        over.set()
    assert len(warned) == 1
    assert "timed out" in warned[0]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl, which makes a certificate")
def test_kubeflow_gets_the_token_over_tls_and_another_certificate_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    files = []
    for name in ("mine", "other"):
        files.append(tmp_path / f"{name}.pem")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files[-1], "-out",
                        tmp_path / f"{name}.crt", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
                        "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
        files[-1].write_text(files[-1].read_text() + (tmp_path / f"{name}.crt").read_text())
    token = tmp_path / "token"
    token.write_text("first\n")
    with server(says(200), files[0]) as (url, got):
        environment = {URL: url, TOKEN: str(token), CERTIFICATE: str(tmp_path / "mine.crt")}
        target = Target.of("kubeflow", environment)
        target.send("{}")
        token.write_text("second\n")
        target.send("{}")
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            Target.of("kubeflow", environment | {CERTIFICATE: str(tmp_path / "other.crt")}).send("{}")
    assert [headers["Authorization"] for headers, _ in got] == ["Bearer first", "Bearer second"]


# ------------------------------------------------------------------------------------------------------------- manifest
def of(kind: type, *allowed: Any, least: int | None = None) -> Any:
    def holds(value: Any) -> bool:
        return type(value) is kind and (not allowed or value in allowed) and (least is None or value >= least)

    return holds


ANY, TEXT, COUNT = (lambda value: True), of(str), of(int, least=1)
#: the fields that a manifest of trainer.kubeflow.org/v1alpha1 may have (kubeflow/trainer 2.2), without those that no
#: manifest here uses. A name in upper case must be there. A list has one rule for all of its elements
POD = {"SPEC": {"securityContext": {"fsGroup": of(int)}, "CONTAINERS": [{
    "NAME": of(str, "node"), "image": TEXT, "command": [TEXT], "args": [TEXT],
    "securityContext": {"runAsUser": of(int)}, "readinessProbe": {"tcpSocket": {"PORT": COUNT}}}]}}
KINDS: dict[str, Any] = {
    "ClusterTrainingRuntime": {
        "mlPolicy": {"numNodes": COUNT, "mpi": {
            "numProcPerNode": COUNT, "mpiImplementation": of(str, "OpenMPI"), "sshAuthMountPath": TEXT,
            "runLauncherAsNode": of(bool)}},
        "TEMPLATE": {"SPEC": {
            "network": {"publishNotReadyAddresses": of(bool)},
            "successPolicy": {"OPERATOR": of(str, "All", "Any"), "targetReplicatedJobs": [TEXT]},
            "replicatedJobs": [{
                "NAME": of(str, "launcher", "node"),
                "dependsOn": [{"NAME": TEXT, "STATUS": of(str, "Ready", "Complete")}],
                "TEMPLATE": {"metadata": {"labels": ANY}, "SPEC": {"TEMPLATE": POD}}}]}}},
    "TrainJob": {
        "RUNTIMEREF": {"NAME": TEXT, "apiGroup": TEXT, "kind": TEXT},
        "trainer": {"image": TEXT, "command": [TEXT], "args": [TEXT], "env": ANY, "numNodes": of(int, least=0),
                    "numProcPerNode": COUNT, "resourcesPerNode": ANY},
        "suspend": of(bool), "activeDeadlineSeconds": COUNT}}


def wrong(value: Any, rule: Any, where: str = "") -> list[str]:
    """The places at which a value does not follow a rule."""
    if callable(rule):
        return [] if rule(value) else [where]
    if isinstance(rule, list):
        return ([where] if not isinstance(value, list) else
                [w for i, v in enumerate(value) for w in wrong(v, rule[0], f"{where}[{i}]")])
    if not isinstance(value, dict):
        return [where]
    names = {name.lower(): name for name in rule}
    found = [f"{where}.{name}" for name in value if name.lower() not in names]
    found += [f"{where}.{name.lower()} is missing" for name in rule if name.isupper()
              and name.lower() not in map(str.lower, value)]
    return found + [w for name, v in value.items() if name.lower() in names
                    for w in wrong(v, rule[names[name.lower()]], f"{where}.{name}")]


def manifests() -> list[Any]:
    text = (ROOT / "docs" / "clusters.md").read_text()
    return [*need("yaml").safe_load_all(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])]


def test_the_manifest_has_the_fields_of_the_published_schema() -> None:
    runtime, job = manifests()
    for manifest in (runtime, job):
        assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
        assert wrong(manifest["spec"], KINDS[manifest["kind"]]) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobs = {each["name"]: each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"] == ["launcher"]
    labels = jobs["launcher"]["template"]["metadata"]["labels"]  # by which the launcher gets the address and the token
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    trainer = job["spec"]["trainer"]
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["args"][:2] == ["-n", str(ranks)]


def test_the_command_of_the_manifest_is_one_of_minidl(monkeypatch: Any) -> None:
    from minidl.cli.parser import parse

    _, job = manifests()
    args = job["spec"]["trainer"]["args"]
    assert parse(args[args.index("minidl") + 1:]).status == status.KUBEFLOW


@pytest.mark.parametrize("change", ["numNodes: two", "numProcPerNode: 0", "mpiImplementation: MPICH", "images: x"])
def test_the_check_of_manifests_can_fail(change: str) -> None:
    name, _, value = change.partition(": ")
    runtime, job = manifests()
    where = {"numNodes": job["spec"]["trainer"], "images": job["spec"]["trainer"]}.get(
        name, runtime["spec"]["mlPolicy"]["mpi"])
    where[name] = need("yaml").safe_load(value)
    assert [w for m in (runtime, job) for w in wrong(m["spec"], KINDS[m["kind"]])]
