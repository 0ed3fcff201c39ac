"""Harnesses as data: what to mount, what to write, what to run, and what its exit means."""

from openforgerl.harnesses.catalogue import inspect, install, installable, installed
from openforgerl.harnesses.evidence import observed_user_agents
from openforgerl.harnesses.installation import Installation, default_cache
from openforgerl.harnesses.options import CommandOptions, HarnessOptions, PiOptions, ReactOptions

__all__ = [
    "CommandOptions",
    "HarnessOptions",
    "Installation",
    "PiOptions",
    "ReactOptions",
    "default_cache",
    "inspect",
    "install",
    "installable",
    "installed",
    "observed_user_agents",
]
