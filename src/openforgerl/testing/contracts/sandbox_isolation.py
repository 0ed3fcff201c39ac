"""Contract checks of what an agent must not reach."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from openforgerl.errors import InputError
from openforgerl.testing.contracts.case import Case, refused, shell, told
from openforgerl.types import Layer


async def only_the_endpoint_is_reachable(case: Case) -> None:
    """The proxy answers on the endpoint's port; a listener beside it on the host, and the outside, do not."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"proxy got " + await reader.read(4))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with socket.socket() as canary:
        canary.bind(("0.0.0.0", 0))
        canary.listen()
        closed = canary.getsockname()[1]
        spec = msgspec.structs.replace(case.spec, endpoint=server.sockets[0].getsockname())
        async with case.open().create(spec, "a-1") as sandbox:
            ask = f"import socket; s = socket.create_connection(({spec.endpoint_host!r}, {spec.endpoint_port})); "
            ask += "s.sendall(b'ping'); print(s.recv(99).decode())"
            end = await sandbox.exec(["python3", "-c", ask], env={}, timeout=20)
            assert end.stdout == b"proxy got ping\n", end
            look = "import socket, sys\nfor host in ('127.0.0.1', '10.0.0.1', '192.0.2.1'):\n    s = socket.socket()\n"
            look += f"    s.settimeout(2)\n    print(s.connect_ex((host, {closed})) == 0)\n"
            look += "print(sorted(name for _, name in socket.if_nameindex()))"
            end = await sandbox.exec(["python3", "-c", look], env={}, timeout=20)
            assert end.stdout == b"False\nFalse\nFalse\n['lo']\n", end
    server.close()
    await server.wait_closed()


async def links_lead_nowhere(case: Case) -> None:
    """A link that the agent made is neither read nor exported nor written through; none goes in."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        plant = "echo secret > ~/secret; cd /workspace; ln -s ~/secret link; ln -s ~ way; mkfifo pipe; echo ok > plain"
        await told(sandbox, plant)
        for path in ("link", "way/secret", "pipe", "../home/agent/secret"):
            with refused(InputError):
                await asyncio.wait_for(sandbox.read("/workspace/" + path, limit=100), 10)
        await sandbox.export(["/workspace"], case.folder / "out", limit=1 << 20)
        assert [path.name for path in (case.folder / "out/workspace").iterdir()] == ["plain"]
        await sandbox.write("/workspace/link", b"ours")
        assert await told(sandbox, "cat ~/secret; cat /workspace/link") == "secret\nours"
    (case.folder / "link").symlink_to("/etc/passwd")
    spec = msgspec.structs.replace(case.spec, files={"/workspace/x": str(case.folder / "link")})
    with refused(InputError, "neither a regular file nor a directory"):
        async with case.open().create(spec, "a-2"):
            pass
    assert await case.leftovers() == []


async def set_user_id_gives_nothing(case: Case) -> None:
    """Neither inside nor on what is carried out."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        await told(sandbox, "cp /usr/bin/id /workspace/id && chmod 6755 /workspace/id && /workspace/id -u")
        await sandbox.export(["/workspace"], case.folder / "out", limit=8 << 20)
    assert (case.folder / "out/workspace/id").stat().st_mode & 0o7777 == 0o755


async def two_do_not_see_each_other(case: Case) -> None:
    """Neither files nor processes nor abstract sockets."""
    backend = case.open()
    async with backend.create(case.spec, "a-1") as one, backend.create(case.spec, "b-1") as other:
        await one.write("/tmp/mine", b"1")
        hold = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0contract'); s.listen(); "
        hold += "time.sleep(79.5)"
        running = asyncio.create_task(one.exec(["python3", "-c", hold], env={}, timeout=60))
        await asyncio.sleep(1.0)
        look = "ls /tmp; grep -lsa 79[.]5 /proc/[0-9]*/cmdline; grep -c contract /proc/net/unix; true"
        assert await told(other, look) == "0\n"
        assert "/cmdline" in await told(one, look)
        await one.kill_agent()
        await running


async def init_cannot_be_harmed(case: Case) -> None:
    """No signal, no trace, no look into its memory, descriptors or environment."""
    code = "import os, resource\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\n"
    code += "for name in ('environ', 'mem', 'maps'):\n    try: open('/proc/1/' + name, 'rb').read(1); print(name)\n"
    code += "    except OSError: pass\ntry: os.listdir('/proc/1/fd'); print('fd')\nexcept OSError: pass\n"
    code += "try: resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64)); print('limits')\nexcept OSError: pass\n"
    async with case.open().create(case.spec, "a-1") as sandbox:
        end = await sandbox.exec(["python3", "-c", code], env={}, timeout=20)
        assert (end.code, end.stdout) == (0, b""), end
        assert await told(sandbox, "echo unharmed") == "unharmed\n"


async def layers_are_read_only_and_scratch_is_not(case: Case) -> None:
    """A harness's installation cannot be changed, also where it lies in a writable directory."""
    layer = case.folder / "layer"
    layer.mkdir()
    layer.chmod(0o755)
    (layer / "tool").write_text("a tool\n")
    layers = (Layer(source=str(layer), target="/opt/tool"), Layer(source=str(layer), target="/home/agent/.tool"))
    spec = msgspec.structs.replace(case.spec, layers=layers, scratch=("/logs/verifier", "/tests"))
    async with case.open().create(spec, "a-1") as sandbox:
        script = (
            "cat /opt/tool/tool ~/.tool/tool; touch /logs/verifier/x /tests/x && echo ok; touch /opt/tool/x ~/.tool/x"
        )
        end = await sandbox.exec(shell(script), env={}, timeout=20)
        assert end.stdout == b"a tool\na tool\nok\n", end
        assert end.stderr.count(b"Read-only file system") == 2, end
    assert [path.name for path in layer.iterdir()] == ["tool"]


async def no_other_socket_family_exists(case: Case) -> None:
    """AF_VSOCK reaches the hypervisor from any net namespace."""
    code = "import socket\nfor family, kind in ((40, 1), (38, 5), (17, 3), (16, 3)):\n    try: "
    code += "socket.socket(family, kind).close(); print(family)\n    except OSError: pass\n"
    async with case.open().create(case.spec, "a-1") as sandbox:
        end = await sandbox.exec(["python3", "-c", code], env={}, timeout=20)
        assert end.stdout == b"16\n", end
