"""The contract of `protocols.Sandboxes`: one list of checks for every backend.

A test gives a `Case` and runs each check by its name:

    @pytest.mark.parametrize("name", CHECKS)
    async def test_contract(name: str, case: Case) -> None:
        await CHECKS[name](case)

A check raises AssertionError. `WITHOUT_PROGRAMS` is what a backend that runs none (a fake) can be held to; the others
run `sh`, `python3`, GNU grep and coreutils inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import ModuleType

from openforgerl.testing.contracts import sandbox_files, sandbox_isolation, sandbox_programs
from openforgerl.testing.contracts.case import Case

Check = Callable[[Case], Awaitable[None]]


def _checks(*modules: ModuleType) -> dict[str, Check]:
    return {
        name: check
        for module in modules
        for name, check in vars(module).items()
        if getattr(check, "__module__", "") == module.__name__ and not name.startswith("_")
    }


WITHOUT_PROGRAMS = _checks(sandbox_files)
CHECKS = _checks(sandbox_files, sandbox_programs, sandbox_isolation)
