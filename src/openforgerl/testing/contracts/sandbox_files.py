"""Contract checks that need no program inside: life and files."""

from __future__ import annotations

import os

import msgspec

from openforgerl.errors import InputError, StageError
from openforgerl.testing.contracts.case import Case, refused
from openforgerl.types import Origin, Stage


async def it_has_a_name_while_it_lives(case: Case) -> None:
    """`ref` and `list` agree; another run's list has none; after closing nobody's has."""
    backend = case.open()
    run = case.spec.run_id
    async with backend.create(case.spec, "a-1") as sandbox:
        ref = sandbox.ref
        assert (ref.run_id, ref.attempt_id) == (run, "a-1")
        assert ref.backend == case.names.get("backend", ref.backend)
        assert sandbox.report["backend"] == ref.backend
        assert [one.attempt_id for one in await backend.list(run)] == ["a-1"]
        assert await backend.list("another-run") == []
        assert msgspec.json.decode(msgspec.json.encode(ref), type=type(ref)) == ref
    assert await backend.list(run) == []


async def an_attempt_may_have_two(case: Case) -> None:
    """Grading takes a fresh sandbox while the agent's is there."""
    backend = case.open()
    async with backend.create(case.spec, "a-1") as one, backend.create(case.spec, "a-1-verify") as other:
        await one.write("/workspace/mine", b"1")
        with refused(FileNotFoundError):
            await other.read("/workspace/mine", limit=10)
        assert len(await backend.list(case.spec.run_id)) == 2


async def closing_twice_is_closing(case: Case) -> None:
    """`close` is idempotent, also before the block ends."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        await sandbox.close()
        await sandbox.close()
    assert await case.leftovers() == []


async def an_error_inside_the_block_closes_it(case: Case) -> None:
    """Whatever happens, nothing stays."""
    with refused(ZeroDivisionError):
        async with case.open().create(case.spec, "a-1"):
            raise ZeroDivisionError
    assert await case.leftovers() == []


async def bytes_go_in_and_come_out(case: Case) -> None:
    """Any bytes, large files, replaced files, missing files, files larger than allowed."""
    large = os.urandom(9 << 20)  # more than one frame
    async with case.open().create(case.spec, "a-1") as sandbox:
        for name, data in (("small", bytes(range(256))), ("empty", b""), ("large", large)):
            await sandbox.write(f"/workspace/deep/{name}", data)
            assert await sandbox.read(f"/workspace/deep/{name}", limit=len(data)) == data
        await sandbox.write("/workspace/deep/large", b"short now")
        assert await sandbox.read("/workspace/deep/large", limit=100) == b"short now"
        with refused(FileNotFoundError):
            await sandbox.read("/workspace/nothing", limit=10)
        with refused(InputError):
            await sandbox.read("/workspace/deep/small", limit=255)


async def the_environment_is_there_from_the_start(case: Case) -> None:
    """`spec.files`: single files and trees, binary and empty."""
    source = case.folder / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep/data.bin").write_bytes(bytes(range(256)) * 100)
    (source / "empty").write_bytes(b"")
    files = {"/workspace": str(source), "/home/agent/one": str(source / "deep/data.bin")}
    async with case.open().create(msgspec.structs.replace(case.spec, files=files), "a-1") as sandbox:
        for path in ("/workspace/deep/data.bin", "/home/agent/one"):
            assert await sandbox.read(path, limit=30_000) == bytes(range(256)) * 100
        assert await sandbox.read("/workspace/empty", limit=1) == b""


async def declared_paths_come_out(case: Case) -> None:
    """`export`: under their full paths, absent ones simply absent."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        await sandbox.write("/workspace/a/b", b"data")
        await sandbox.write("/home/agent/secret", b"stays")
        await sandbox.export(["/workspace", "/nowhere"], case.folder / "out", limit=1 << 20)
    found = sorted(str(path.relative_to(case.folder / "out")) for path in (case.folder / "out").rglob("*"))
    assert found == ["workspace", "workspace/a", "workspace/a/b"]
    assert (case.folder / "out/workspace/a/b").read_bytes() == b"data"


async def too_much_to_export_is_the_policys_failure(case: Case) -> None:
    """Above the limit: a failure of the policy's making, and the sandbox lives."""
    async with case.open().create(case.spec, "a-1") as sandbox:
        await sandbox.write("/workspace/big", bytes(20_000))
        with refused(StageError, "limit" if case.names.get("backend") != "fake" else "larger") as caught:
            await sandbox.export(["/workspace"], case.folder / "out", limit=10_000)
        (error,) = caught
        assert isinstance(error, StageError)
        assert (error.stage, error.origin, error.retryable) == (Stage.VERIFY, Origin.POLICY, False)
        assert len(await sandbox.read("/workspace/big", limit=20_000)) == 20_000


async def another_instance_reaps_it(case: Case) -> None:
    """What one orchestrator left, the next one finds and destroys; other runs' sandboxes stay."""
    other_run = msgspec.structs.replace(case.spec, run_id=case.spec.run_id + "-other")
    backend = case.open()
    async with backend.create(case.spec, "a-1"), backend.create(other_run, "b-1") as stays:
        heir = case.open() if case.names.get("backend") != "fake" else backend
        assert await heir.reap(case.spec.run_id) == 1
        assert await heir.reap(case.spec.run_id) == 0
        await stays.write("/workspace/alive", b"yes")
        assert [ref.attempt_id for ref in await heir.list(other_run.run_id)] == ["b-1"]
    assert await case.leftovers() == []
