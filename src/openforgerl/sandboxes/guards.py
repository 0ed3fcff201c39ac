"""The guards of the process sandbox, each of which a test can switch off to see its attack succeed.

Not part of any options: no configuration reaches this, only the constructor of `ProcessSandboxes`.
"""

from __future__ import annotations

import msgspec


class Guards(msgspec.Struct, frozen=True, kw_only=True):
    """All on, always, except in tests that show what a guard is worth."""

    own_network: bool = True
    """Own net namespace: only `lo`, with the endpoint on it."""
    own_host_uid: bool = True
    """Started by root, the agent is an unprivileged uid on the host too; off: it is the host's root."""
    no_capabilities: bool = True
    """Empty capability sets and no further user namespaces."""
    seccomp: bool = True
    """The system-call filter of `seccomp.py`."""
    hidden_host: bool = True
    """Nothing of the host but the system directories; off: its root, /proc and all, is mounted
    read-only at /host."""
    read_only: bool = True
    """The root and /dev cannot be written."""
    undumpable: bool = True
    """Our init cannot be traced, and its /proc files not be opened, by the agent's uid."""
    process_limit: bool = True
    memory_limit: bool = True
    disk_limit: bool = True
    complete_kill: bool = True
    """`kill_agent` kills all; off: only the process groups that we started."""
    plain_files: bool = True
    """File access refuses links and special files; off: follows and copies what is there."""

    def off(self) -> list[str]:
        """Names of the guards that are switched off."""
        return [name for name in self.__struct_fields__ if not getattr(self, name)]
