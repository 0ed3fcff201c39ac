"""Attacks by reach: the host's network, files and processes, other attempts, the kernel's mounts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket

import pytest

from openforgerl.sandboxes.guards import Guards


@contextlib.contextmanager
def canaries():
    """A TCP listener on the host's loopback and an abstract unix one: (port, name)."""
    name = f"openforgerl-canary-{secrets.token_hex(4)}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind("\0" + name)
        unix.listen()
        yield tcp.getsockname()[1], name


async def test_only_the_endpoint_is_reachable(cell):
    with canaries() as (port, name):
        async with cell(endpoint_port=8080) as inside:
            words = await inside.words("scan.py", port - 20, port + 20, name)
            assert words == ["|", "lo"]
            words = await inside.words("scan.py", 8070, 8090, name)
            assert words == ["127.0.0.1:8080", "|", "lo"]


async def test_in_the_hosts_network_the_canaries_are_found(cell):
    with canaries() as (port, name):
        async with cell(Guards(own_network=False)) as inside:
            words = await inside.words("scan.py", port, port, name)
    assert words[: words.index("|")] == [f"127.0.0.1:{port}", "abstract"]


async def test_no_other_socket_family_exists(cell):
    """AF_VSOCK talks to the hypervisor from any net namespace, AF_ALG to kernel code that nothing here needs."""
    async with cell() as inside:
        assert await inside.words("families.py") == []
    here = []
    for family, kind in ((40, socket.SOCK_STREAM), (38, socket.SOCK_SEQPACKET)):
        with contextlib.suppress(OSError):
            socket.socket(family, kind).close()
            here.append(str(family))
    async with cell(Guards(seccomp=False)) as inside:
        assert await inside.words("families.py") == here


async def test_nothing_of_the_host_can_be_read(cell, open_folder):
    secret = secrets.token_hex(8)
    (open_folder / f"verifier-{secret}").write_text(secret)
    host = await asyncio.create_subprocess_exec("sleep", "61." + str(int(secret, 16)))
    canary = "61." + str(int(secret, 16))
    try:
        async with cell() as inside:
            assert await inside.words("find_file.py", f"verifier-{secret}", canary, open_folder) == []
        async with cell(Guards(hidden_host=False)) as inside:
            words = await inside.words("find_file.py", f"verifier-{secret}", canary, open_folder)
            assert set(words) == {"file", secret, "process"}
    finally:
        host.kill()
        await host.wait()


async def test_attempts_do_not_see_each_other(cell):
    secret = f"attempt-{secrets.token_hex(8)}"
    async with cell() as first, cell() as second:
        await first.sandbox.write(f"/workspace/{secret}", secret.encode())
        await first.sandbox.write(f"/tmp/{secret}", secret.encode())
        running = asyncio.create_task(first.sandbox.exec(["sleep", "20.125"], env={"KEY": secret}, timeout=30))
        await asyncio.sleep(0.2)
        assert await second.words("find_file.py", secret, "20.125", "/tmp") == []
        assert await first.words("find_file.py", secret, "20.125", "/tmp") != []
        await first.sandbox.kill_agent()
        await running
        one, other = first.sandbox.report, second.sandbox.report
        assert all(one["namespaces"][kind] != other["namespaces"][kind] for kind in ("pid", "net", "ipc", "uts", "mnt"))


async def test_mounts_cannot_be_changed(cell):
    async with cell() as inside:
        assert await inside.words("remount.py") == []
        assert inside.sandbox.report["capabilities"] == "0" * 16


@pytest.mark.parametrize("guards", [Guards(seccomp=False), Guards(no_capabilities=False)])
async def test_one_of_the_two_mount_guards_is_enough(cell, guards, backend):
    async with cell(guards) as inside:
        # the filter is all that keeps a container from user namespaces of its own; in one, no mount of ours moves
        harmless = {"unshare"} if backend == "container" and not guards.seccomp else set()
        assert set(await inside.words("remount.py")) == harmless


async def test_with_capabilities_and_all_calls_the_system_becomes_writable(cell, backend):
    async with cell(Guards(seccomp=False, no_capabilities=False)) as inside:
        mounted = {"umount"} if backend == "process" else set()  # /etc/ssl is part of an image's root
        assert set(await inside.words("remount.py")) == {"unshare", "mount", "remount", "write"} | mounted


async def test_keyrings_are_out_of_reach(cell):
    """A session keyring is inherited from whoever started us, and may hold its secrets."""
    call = "import ctypes; print(ctypes.CDLL(None).syscall({'x86_64': 250, 'aarch64': 219}"
    call += "[__import__('os').uname().machine], 0, -3, 0))"
    async with cell() as inside:
        end = await inside.sandbox.exec(["python3", "-c", call], env={}, timeout=5)
        assert end.stdout == b"-1\n"
