"""Attacks by files: links, pipes, set-user-id programs, and programs that lie in wait for the verifier."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from openforgerl.errors import InputError, StageError
from openforgerl.sandboxes.guards import Guards
from openforgerl.types import Origin


def found(top: Path) -> dict[str, str]:
    """Path below `top` → what it is, with its mode."""
    kinds: dict[str, str] = {}
    for path in sorted(top.rglob("*")):
        kind = "link" if path.is_symlink() else "directory" if path.is_dir() else "file"
        kinds[str(path.relative_to(top))] = f"{kind} {path.lstat().st_mode & 0o7777:o}"
    return kinds


async def test_an_export_is_plain_data(cell, tmp_path):
    async with cell() as inside:
        assert (await inside.attack("plant_links.sh")).code == 0
        async with asyncio.timeout(10):
            await inside.sandbox.export(["/workspace/out", "/workspace/way/secret"], tmp_path / "out", limit=1 << 20)
        skipped = dict(inside.sandbox.report["export_skipped"])
    out = found(tmp_path / "out/workspace/out")
    assert out == {"hard": "file 644", "plain": "file 644", "program": "file 755"}
    assert (tmp_path / "out/workspace/out/hard").stat().st_nlink == 1
    below = "/workspace/out/"
    assert set(skipped) == {below + "folder", below + "link", below + "pipe", below + "socket", "/workspace/way/secret"}


async def test_names_that_are_no_text_can_be_recorded(cell, tmp_path):
    """What init says of them becomes the evidence of a verdict: were it no text, committing it would end the run."""
    async with cell() as inside:
        assert (await inside.attack("deep_names.py")).code == 0
        with pytest.raises(StageError) as refused:
            await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
    assert refused.value.kind == "too_large" and "deeper than" in refused.value.message
    assert "\\udcff" in refused.value.message  # the name, in a form that any record takes
    msgspec.json.encode(refused.value.failure())


def contents(top: Path) -> set[bytes]:
    return {path.read_bytes() for path in top.rglob("*") if path.is_file()}


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_link_that_comes_and_goes_leads_nowhere(cell, tmp_path, guarded):
    """What was looked at and what is opened must be the same thing."""
    async with cell(Guards(plain_files=guarded)) as inside:
        running = asyncio.create_task(inside.attack("swap_links.py", 4.0))
        await asyncio.sleep(0.5)
        seen: set[bytes] = set()
        for number in range(40):
            await inside.sandbox.export(["/workspace/out"], tmp_path / str(number), limit=1 << 20)
            seen |= contents(tmp_path / str(number))
        await inside.sandbox.kill_agent()
        await running
    assert seen == ({b"data"} if guarded else {b"data", b"secret"})


async def test_links_into_proc_lead_nowhere(cell, tmp_path):
    """For whoever follows them they are its own: its environment, its descriptors, its root."""
    links = ["self/environ", "self/fd/0", "self/fd/3", "self/fd/4", "1/environ", "self/mem", "self/root", "self/cwd"]
    script = "mkdir out; cd out; for one; do ln -s /proc/$one $(echo $one | tr / -); done"
    async with cell() as inside:
        assert (await inside.sandbox.exec(["sh", "-c", script, "sh", *links], env={}, timeout=5)).code == 0
        await inside.sandbox.export(["/workspace/out"], tmp_path / "out", limit=1 << 20)
        assert len(inside.sandbox.report["export_skipped"]) == len(links)
        for one in links:
            with pytest.raises(InputError):
                await inside.sandbox.read("/workspace/out/" + one.replace("/", "-"), limit=100)
        end = await inside.sandbox.exec(["true"], env={}, timeout=5)
    assert end.code == 0 and found(tmp_path / "out/workspace/out") == {}


async def test_a_file_of_nothing_costs_nothing(cell, tmp_path):
    async with cell() as inside:
        await inside.attack("sparse.py", 1 << 40)
        async with asyncio.timeout(10):
            with pytest.raises(StageError) as refused:
                await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
            with pytest.raises(InputError, match="larger than"):
                await inside.sandbox.read("/workspace/sparse", limit=1000)
        assert (refused.value.kind, refused.value.origin) == ("too_large", Origin.POLICY)
        await inside.attack("sparse.py", 1 << 20)
        await inside.sandbox.export(["/workspace"], tmp_path / "fits", limit=1 << 20)
    assert (tmp_path / "fits/workspace/sparse").read_bytes() == bytes(1 << 20)


async def test_no_name_becomes_another(cell, tmp_path):
    """By case, by Unicode, by what is escaped: a verifier must see each file under its own name."""
    async with cell() as inside:
        assert (await inside.attack("odd_names.py")).code == 0
        there = await inside.words("list_names.py", "/workspace/odd")
        await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
        assert inside.sandbox.report["export_skipped"] == []
    names = [os.fsencode(name) for name in os.listdir(tmp_path / "out/workspace/odd")]
    assert sorted(name.hex() for name in names) == [word.split("=")[0] for word in there] and len(there) == 19
    async with cell() as fresh:
        await fresh.sandbox.write_tree(tmp_path / "out/workspace", "/workspace")
        assert await fresh.words("list_names.py", "/workspace/odd") == there


async def test_a_path_that_no_program_could_name_is_the_policys(cell, tmp_path):
    """The host cannot write it, and must not call that its own failure: the attempt would not be graded."""
    async with cell() as inside:
        assert (await inside.attack("long_path.py")).code == 0
        with pytest.raises(StageError) as refused:
            await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
    assert (refused.value.kind, refused.value.origin) == ("too_large", Origin.POLICY)


async def test_a_list_of_what_was_skipped_has_an_end(cell, tmp_path):
    async with cell() as inside:
        assert (await inside.attack("many_oddities.py")).code == 0
        await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
        report = inside.sandbox.report
    assert 0 < len(report["export_skipped"]) <= 1000
    assert len(report["export_skipped"]) + report["export_skipped_more"] == 2000
    assert all(path.endswith(f"{number:04}") for number, (path, _) in enumerate(report["export_skipped"]))


async def test_a_path_declared_within_another_comes_out_once(cell, tmp_path):
    async with cell() as inside:
        await inside.sandbox.write("/workspace/a/b", b"1")
        paths = ["/workspace", "/workspace/a/b", "/workspace/a/", "/workspace"]
        await inside.sandbox.export(paths, tmp_path / "out", limit=1)
    assert found(tmp_path / "out/workspace") == {"a": "directory 755", "a/b": "file 644"}


async def test_without_the_guard_links_lead_out_and_modes_stay(cell, tmp_path):
    async with cell(Guards(plain_files=False)) as inside:
        assert (await inside.attack("plant_links.sh")).code == 0
        await inside.sandbox.exec(["rm", "/workspace/out/pipe", "/workspace/out/socket"], env={}, timeout=5)
        await inside.sandbox.export(["/workspace/out", "/workspace/way/secret"], tmp_path / "out", limit=1 << 20)
    assert (tmp_path / "out/workspace/out/link").read_text() == "secret\n"
    assert (tmp_path / "out/workspace/way/secret").read_text() == "secret\n"
    assert (tmp_path / "out/workspace/out/program").stat().st_mode & 0o6000 == 0o6000


async def test_without_the_guard_a_pipe_holds_the_export_for_ever(cell, tmp_path):
    async with cell(Guards(plain_files=False)) as inside:
        await inside.sandbox.exec(["mkfifo", "/workspace/pipe"], env={}, timeout=5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)


PLANTS = ["ln /workspace/mine /tmp/tests/verify.sh", "ln -s /workspace/mine /tmp/tests/verify.sh"]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("guarded", [True, False])
async def test_a_link_planted_where_the_verifier_will_be_written(cell, plant, guarded):
    """The agent would learn the verifier, or change it after it is written, through its own name for the file."""
    async with cell(Guards(plain_files=guarded)) as inside:
        # both names on one tmpfs, as a hard link needs
        script = "mkdir /tmp/tests /tmp/own; echo mine > /tmp/own/mine; " + plant.replace("/workspace", "/tmp/own")
        assert (await inside.sandbox.exec(["sh", "-c", script], env={}, timeout=5)).code == 0
        await inside.sandbox.write("/tmp/tests/verify.sh", b"verifier", mode=0o755)
        assert await inside.sandbox.read("/tmp/tests/verify.sh", limit=100) == b"verifier"
        other = await inside.sandbox.read("/tmp/own/mine", limit=100)
        assert other == (b"mine\n" if guarded else b"verifier")


async def test_a_read_follows_no_link_and_waits_for_no_pipe(cell):
    async with cell() as inside:
        await inside.attack("plant_links.sh")
        for path in ("out/link", "way/secret", "out/pipe", "out/socket", "out", "../home/agent/secret"):
            with pytest.raises(InputError):
                async with asyncio.timeout(5):
                    await inside.sandbox.read("/workspace/" + path, limit=100)


VERIFY = "python3 -c 'import sys'; bash -lic true; ls / > /dev/null; bash -c 'ls /' > /dev/null; "
VERIFY += "/bin/ls /tmp/shim-* /logs/verifier"


async def shims(sandbox, env=None) -> str:
    script = VERIFY + " 2>/dev/null; cat /workspace/answer; rm -f /tmp/shim-*"
    return (await sandbox.exec(["bash", "-c", script], env=env or {}, timeout=20)).stdout.decode()


async def test_programs_in_wait_do_not_reach_a_fresh_sandbox(cell, tmp_path):
    scratch = ("/logs",)
    async with cell(scratch=scratch) as inside:
        await inside.attack("plant_shims.sh")
        await inside.sandbox.kill_agent()
        await inside.sandbox.export(["/workspace"], tmp_path / "out", limit=1 << 20)
        in_place = await shims(inside.sandbox)
        with_path = await shims(inside.sandbox, {"PATH": "/home/agent/bin:/usr/bin:/bin"})
    async with cell(scratch=scratch) as fresh:
        await fresh.sandbox.write_tree(tmp_path / "out/workspace", "/workspace")
        assert await shims(fresh.sandbox) == "answer\n"
    # the guards are the fresh sandbox and the fixed PATH: without them the plants act
    for effect in ("shim-python", "shim-shell", "reward.txt"):
        assert effect in in_place
    assert "shim-path" in with_path and "shim-path" not in in_place
    assert "shim-system" not in in_place  # what all programs share cannot be written even there


LOOKING = (
    "for d in $(find / /tmp /workspace /home /dev -xdev -type d -writable 2>/dev/null) /dev/shm /dev/mqueue /proc; "
)
LOOKING += "do touch $d/x 2>/dev/null && echo $d; done"


async def test_only_sized_directories_can_be_written(cell, backend):
    async with cell() as inside:
        end = await inside.sandbox.exec(["sh", "-c", LOOKING], env={}, timeout=20)
        expected = {"/dev/shm", "/home/agent", "/tmp", "/tmp/programs", "/workspace"}
        queues = {"/dev/mqueue"} if backend == "container" else set()  # message queues, bounded by RLIMIT_MSGQUEUE
        assert set(end.stdout.decode().split()) == expected | queues


@pytest.mark.process_only
async def test_bubblewraps_own_root_would_be_writable(cell):
    """A container's root belongs to root."""
    async with cell(Guards(read_only=False)) as inside:
        end = await inside.sandbox.exec(["sh", "-c", LOOKING], env={}, timeout=20)
        assert {"/", "/etc", "/.openforgerl"} <= set(end.stdout.decode().split())


async def test_no_set_user_id_program_gives_anything(cell):
    """Even those of the system: no_new_privs is set, and every mount is nosuid."""
    async with cell() as inside:
        script = "cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && /tmp/id -u && grep NoNewPrivs /proc/self/status"
        end = await inside.sandbox.exec(["sh", "-c", script], env={}, timeout=5)
        assert end.stdout.split() == [b"1000", b"NoNewPrivs:", b"1"]
        assert inside.sandbox.report["uid"]["host"] != 0 or os.geteuid() != 0
