"""`openforgerl testing fake-kubernetes`: a kubeconfig that works, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from openforgerl.errors import InputError
from openforgerl.testing.fake_kubernetes import ClusterOptions, FakeCluster, certificates

from .kubectl import pod


async def ask(
    kubeconfig: dict[str, object], method: str, path: str, body: object = None
) -> tuple[int, dict[str, object]]:
    """With nothing but what the kubeconfig says."""
    (cluster,), (user,) = kubeconfig["clusters"], kubeconfig["users"]  # type: ignore[misc]
    authority = base64.b64decode(cluster["cluster"].get("certificate-authority-data", ""))
    tls = ssl.create_default_context(cadata=authority.decode()) if authority else True
    headers = {"Authorization": f"Bearer {user['user']['token']}"}
    url = cluster["cluster"]["server"] + path
    async with (
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=tls)) as session,
        session.request(method, url, json=body) as response,
    ):
        return response.status, await response.json()


@pytest.mark.sandbox
async def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    program = "from openforgerl.cli.main import main; main()"
    words = ["testing", "fake-kubernetes", "--kubeconfig", str(config), "--namespace", "rollouts", "--speed", "50"]
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert server.stdout is not None and server.stderr is not None
    async with asyncio.timeout(30):
        line = (await server.stdout.readline()).decode()
    assert f"export KUBECONFIG={config}" in line
    assert config.stat().st_mode & 0o777 == 0o600
    kubeconfig = json.loads(config.read_text())
    (context,) = kubeconfig["contexts"]
    assert context["context"]["namespace"] == "rollouts"
    pods = "/api/v1/namespaces/rollouts/pods"
    assert (await ask(kubeconfig, "POST", pods, pod("p", "/bin/sh", "-c", "sleep 4242")))[0] == 201
    async with asyncio.timeout(20):
        while True:
            status, found = await ask(kubeconfig, "GET", f"{pods}/p")
            assert status == 200
            if found["status"]["phase"] == "Running":  # type: ignore[index]
                break
            await asyncio.sleep(0.05)
    server.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        _, said = await server.communicate()
    assert server.returncode == 0 and said.decode() == "Stopped. Its pods are gone with it.\n"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # ended meanwhile, or another user's
            assert b"sleep\x004242" not in command


@pytest.mark.skipif(not certificates.can_make(), reason="no openssl program")
async def test_tls_is_trusted_by_its_kubeconfig_and_by_nothing_else() -> None:
    async with FakeCluster(ClusterOptions(tls=True)) as cluster:
        kubeconfig = cluster.kubeconfig()
        assert cluster.url.startswith("https://127.0.0.1:")
        assert (await ask(kubeconfig, "GET", "/api/v1/namespaces/default/pods"))[0] == 200
        del kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"]
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(kubeconfig, "GET", "/api/v1/namespaces/default/pods")


def test_without_openssl_there_is_no_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not certificates.can_make()
    with pytest.raises(InputError, match="install it"):
        certificates.make(tmp_path)
