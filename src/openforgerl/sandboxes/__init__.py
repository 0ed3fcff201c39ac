"""Where agents run: backends behind `protocols.Sandboxes`."""

from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check, probe
from openforgerl.sandboxes.process import ProcessSandbox, ProcessSandboxes

__all__ = ["Check", "ProcessSandbox", "ProcessSandboxes", "SandboxOptions", "probe"]
