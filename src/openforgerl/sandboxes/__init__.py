"""Where agents run: backends behind `protocols.Sandboxes`."""

from openforgerl.sandboxes.options import SandboxOptions
from openforgerl.sandboxes.probe import Check, probe
from openforgerl.sandboxes.process import ProcessSandboxes
from openforgerl.sandboxes.sandbox import LiveSandbox

__all__ = ["Check", "LiveSandbox", "ProcessSandboxes", "SandboxOptions", "probe"]
