"""Who we are to an API server: a kubeconfig (token, client certificate, exec plugin) or a pod's service account."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from openforgerl.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_FILE_SECONDS = 60.0
"""A projected token is rotated by the kubelet long before its end; reading it once a minute is enough."""
_EXEC_TIMEOUT = 60.0

Entry = dict[str, Any]


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is and how a request proves who it is from."""

    server: str
    namespace: str
    source: str
    """What told us, for people: a file, or `service account`."""
    tls: ssl.SSLContext | None
    """None for plain HTTP."""
    token: Callable[[], Awaitable[str | None]]
    """The bearer token of now; None without one."""


def find_access(kubeconfig: str, context: str, environ: Mapping[str, str]) -> Access:
    """By `kubeconfig` or KUBECONFIG, else as the pod we run in, else by ~/.kube/config. ConfigError naming the ways."""
    given = kubeconfig or environ.get("KUBECONFIG", "")
    if given:
        return from_kubeconfig([Path(path).expanduser() for path in given.split(os.pathsep) if path], context)
    if (SERVICE_ACCOUNT / "token").is_file() and environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(SERVICE_ACCOUNT, environ)
    home = Path(environ.get("HOME", "/")) / ".kube" / "config"
    if home.is_file():
        return from_kubeconfig([home], context)
    raise ConfigError(
        "no Kubernetes cluster is known: set KUBECONFIG or sandbox.kubernetes.kubeconfig, "
        "or run in a pod that has a service account"
    )


def in_cluster(folder: Path, environ: Mapping[str, str]) -> Access:
    """As the pod's service account, whose token is read again and again because it is rotated."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=(folder / "namespace").read_text().strip(),
        source="service account",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        token=_TokenFile(folder / "token").read,
    )


def from_kubeconfig(paths: list[Path], context: str) -> Access:
    """The (named or current) context of one or several files; of two entries with one name the first counts."""
    documents = [(path, _document(path)) for path in paths]
    where = ", ".join(map(str, paths))
    name = context or next((str(d["current-context"]) for _, d in documents if d.get("current-context")), "")
    if not name:
        raise ConfigError(f"{where} has no current-context: name one with sandbox.kubernetes.context")
    chosen, _ = _entry(documents, "contexts", "context", name)
    cluster, folder = _entry(documents, "clusters", "cluster", str(chosen.get("cluster", "")))
    user, user_folder = _entry(documents, "users", "user", str(chosen["user"])) if chosen.get("user") else ({}, folder)
    server = str(cluster.get("server") or "").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise ConfigError(f"{where}: cluster of context {name!r}: server must be an http(s) URL; got {server!r}")
    return Access(
        server=server,
        namespace=str(chosen.get("namespace") or "default"),
        source=f"{where}, context {name}",
        tls=_tls(cluster, folder, user, user_folder) if server.startswith("https://") else None,
        token=_token(user, user_folder, where),
    )


def _document(path: Path) -> Entry:
    try:
        document: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"kubeconfig {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"kubeconfig {path} is no YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"kubeconfig {path} is no kubeconfig: its top level is no mapping")
    return document


def _entry(documents: list[tuple[Path, Entry]], group: str, inner: str, name: str) -> tuple[Entry, Path]:
    """A named entry and the folder that its relative paths start from."""
    for path, document in documents:
        for entry in document.get(group) or ():
            if entry.get("name") == name:
                found: Entry = entry.get(inner) or {}
                return found, path.parent
    known = sorted(str(entry.get("name")) for _, document in documents for entry in document.get(group) or ())
    raise ConfigError(f"kubeconfig: {group} has no {name!r}; known: {', '.join(known) or 'none'}")


def _tls(cluster: Entry, folder: Path, user: Entry, user_folder: Path) -> ssl.SSLContext:
    authority = _material(cluster, "certificate-authority", folder)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = _material(user, "client-certificate", user_folder), _material(user, "client-key", user_folder)
    if certificate and key:
        _load_pair(context, certificate, key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """OpenSSL takes a client certificate from files only; these live as long as the call."""
    with tempfile.TemporaryDirectory() as name:
        pair = Path(name, "certificate.pem"), Path(name, "key.pem")
        for path, content in zip(pair, (certificate, key), strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        try:
            context.load_cert_chain(*map(str, pair))
        except ssl.SSLError as error:
            raise ConfigError(f"the client certificate cannot be used: {error}") from error


def _material(entry: Entry, name: str, folder: Path) -> bytes | None:
    """`name` is a file, `name-data` the same in base64."""
    if entry.get(f"{name}-data"):
        return base64.b64decode(str(entry[f"{name}-data"]))
    if entry.get(name):
        path = folder / str(entry[name])
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(f"kubeconfig: {name} {path} cannot be read: {error.strerror}") from error
    return None


def _token(user: Entry, folder: Path, where: str) -> Callable[[], Awaitable[str | None]]:
    if user.get("token"):
        return _Fixed(str(user["token"])).read
    if user.get("tokenFile"):
        return _TokenFile(folder / str(user["tokenFile"])).read
    if user.get("exec"):
        return _Plugin(user["exec"], folder).read
    if user.get("auth-provider") or user.get("username"):
        raise ConfigError(
            f"{where}: use a token, a client certificate or an exec plugin; Kubernetes dropped the others"
        )
    return _Fixed(None).read


class _Fixed:
    def __init__(self, value: str | None) -> None:
        self._value = value

    async def read(self) -> str | None:
        return self._value


class _TokenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._value = ""
        self._until = 0.0

    async def read(self) -> str | None:
        if time.monotonic() >= self._until:
            self._value = self._path.read_text().strip()
            self._until = time.monotonic() + _TOKEN_FILE_SECONDS
        return self._value


class _Plugin:
    """A credential plugin (client.authentication.k8s.io): a program that prints an ExecCredential."""

    def __init__(self, spec: Entry, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._value: str | None = None
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def read(self) -> str | None:
        async with self._asking:
            if self._value is None or time.time() >= self._until:
                self._value, self._until = await self._ask()
            return self._value

    async def _ask(self) -> tuple[str, float]:
        command = str(self._spec.get("command") or "")
        program = str(self._folder / command) if "/" in command else command
        words = [program, *map(str, self._spec.get("args") or ())]
        env = {**os.environ, **{str(pair["name"]): str(pair["value"]) for pair in self._spec.get("env") or ()}}
        api = str(self._spec.get("apiVersion") or "client.authentication.k8s.io/v1")
        env["KUBERNETES_EXEC_INFO"] = json.dumps(
            {"apiVersion": api, "kind": "ExecCredential", "spec": {"interactive": False}}
        )
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*words, env=env, stdout=pipe, stderr=pipe)
            async with asyncio.timeout(_EXEC_TIMEOUT):
                out, err = await process.communicate()
        except (OSError, TimeoutError) as error:
            raise ConfigError(f"the kubeconfig's credential plugin {command!r} failed: {error}") from error
        try:
            status: Entry = json.loads(out)["status"]
            token = str(status["token"])
        except (ValueError, KeyError, TypeError) as error:
            said = err.decode(errors="replace").strip()[-500:]
            raise ConfigError(
                f"the kubeconfig's credential plugin {command!r} gave no token (exit code {process.returncode}): {said}"
            ) from error
        expiry = status.get("expirationTimestamp")
        until = datetime.fromisoformat(str(expiry)).timestamp() - 30 if expiry else time.time() + 300
        return token, until
