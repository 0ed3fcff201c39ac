"""Kubeconfigs and service accounts: where the server is, and how a request proves who it is from."""

from __future__ import annotations

import base64
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from openforgerl.errors import ConfigError
from openforgerl.sandboxes.kubernetes.access import Access, find_access, from_kubeconfig, in_cluster
from openforgerl.sandboxes.kubernetes.http import HttpCluster


def kubeconfig(path: Path, user: dict[str, Any], server: str = "http://127.0.0.1:1", **cluster: Any) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "contexts": [
            {"name": "main", "context": {"cluster": "c", "user": "u", "namespace": "rollouts"}},
            {"name": "bare", "context": {"cluster": "c"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


async def test_a_token_and_the_context(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", {"token": "t0"}, server="http://127.0.0.1:1/")
    access = from_kubeconfig([path], "")
    assert (access.server, access.namespace, access.tls) == ("http://127.0.0.1:1", "rollouts", None)
    assert await access.token() == "t0"
    bare = from_kubeconfig([path], "bare")
    assert (bare.namespace, await bare.token()) == ("default", None)


async def test_a_token_file_is_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t1\n")
    access = from_kubeconfig([kubeconfig(tmp_path / "config", {"tokenFile": "token"})], "")
    assert await access.token() == "t1"


async def test_a_credential_plugin_is_asked_once_for_as_long_as_it_says(tmp_path: Path) -> None:
    program = tmp_path / "plugin.sh"
    answer = {"kind": "ExecCredential", "status": {"token": "t2", "expirationTimestamp": "2999-01-01T00:00:00Z"}}
    program.write_text(
        f"#!/bin/sh\necho x >> {tmp_path}/asked\ntest \"$1\" = get || exit 1\necho '{json.dumps(answer)}'\n"
    )
    program.chmod(0o755)
    plugin = {"command": "./plugin.sh", "args": ["get"], "apiVersion": "client.authentication.k8s.io/v1"}
    access = from_kubeconfig([kubeconfig(tmp_path / "config", {"exec": plugin})], "")
    assert [await access.token(), await access.token()] == ["t2", "t2"]
    assert (tmp_path / "asked").read_text() == "x\n"


async def test_a_plugin_that_fails_says_what_it_said(tmp_path: Path) -> None:
    plugin = {"command": "/bin/sh", "args": ["-c", "echo log in first >&2; exit 3"]}
    access = from_kubeconfig([kubeconfig(tmp_path / "config", {"exec": plugin})], "")
    with pytest.raises(ConfigError, match=r"exit code 3\): log in first"):
        await access.token()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "is no YAML"),
        ("[]", "no mapping"),
        ("{}", "no current-context"),
        ("{current-context: x}", "contexts has no 'x'"),
        ("{current-context: x, contexts: [{name: x, context: {cluster: y}}]}", "clusters has no 'y'"),
        (
            "{current-context: x, contexts: [{name: x, context: {cluster: y}}], clusters: [{name: y, cluster: {}}]}",
            "must be an http",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        from_kubeconfig([tmp_path / "config"], "")


def test_where_a_kubeconfig_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set KUBECONFIG"):
        find_access("", "", {"HOME": str(tmp_path)})
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", {}, server="http://home")
    assert find_access("", "", {"HOME": str(tmp_path)}).server == "http://home"
    named = kubeconfig(tmp_path / "named", {}, server="http://named")
    assert find_access("", "", {"HOME": str(tmp_path), "KUBECONFIG": str(named)}).server == "http://named"
    given = kubeconfig(tmp_path / "given", {}, server="http://given")
    assert find_access(str(given), "", {"KUBECONFIG": str(named)}).server == "http://given"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, good as an authority, a server's and a client's."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "install openssl"
    key, crt = folder / "key.pem", folder / "ca.crt"
    words = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(crt)]
    subprocess.run(words, check=True, capture_output=True)
    return key, crt


async def served(key: Path, crt: Path) -> tuple[web.AppRunner, int, list[str]]:
    """An API server that has a version, wants a client certificate, and notes what it was told."""
    told: list[str] = []

    async def version(request: web.Request) -> web.Response:
        told.append(request.headers.get("Authorization", "none"))
        peer = request.transport.get_extra_info("peercert") if request.transport else None
        told.append("certificate" if peer else "no certificate")
        return web.json_response({"gitVersion": "v1.36.2"})

    app = web.Application()
    app.router.add_get("/version", version)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(crt))
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(str(crt), str(key))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port: int = runner.addresses[0][1]
    return runner, port, told


async def asked(access: Access) -> str:
    cluster = HttpCluster(access, tries=1)
    try:
        return await cluster.version()
    finally:
        await cluster.close()


async def test_a_client_certificate_over_tls(tmp_path: Path) -> None:
    key, crt = certificate(tmp_path)
    runner, port, told = await served(key, crt)
    try:
        user = {"client-certificate": "ca.crt", "client-key-data": base64.b64encode(key.read_bytes()).decode()}
        path = kubeconfig(
            tmp_path / "config", user, server=f"https://127.0.0.1:{port}", **{"certificate-authority": "ca.crt"}
        )
        assert await asked(from_kubeconfig([path], "")) == "v1.36.2"
        assert told == ["none", "certificate"]
        with pytest.raises(OSError, match="certificate"):  # an authority that did not sign the server's
            await asked(from_kubeconfig([kubeconfig(tmp_path / "other", {}, f"https://127.0.0.1:{port}")], ""))
    finally:
        await runner.cleanup()


async def test_a_service_account(tmp_path: Path) -> None:
    key, crt = certificate(tmp_path)
    (tmp_path / "token").write_text("pod-token")
    (tmp_path / "namespace").write_text("team-a")
    runner, port, told = await served(key, crt)
    try:
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        access = in_cluster(tmp_path, environ)
        assert access.namespace == "team-a"
        assert await asked(access) == "v1.36.2"
        assert told == ["Bearer pod-token", "no certificate"]
    finally:
        await runner.cleanup()
