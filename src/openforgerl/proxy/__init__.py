"""The light server between harness and model. Read `exchange.py` first: one model call, start to end."""

from openforgerl.proxy.client import HttpSessions
from openforgerl.proxy.in_process import InProcessSessions
from openforgerl.proxy.options import ProxyOptions
from openforgerl.proxy.server import ProxyServer
from openforgerl.proxy.tokens import control_token

__all__ = ["HttpSessions", "InProcessSessions", "ProxyOptions", "ProxyServer", "control_token"]
