"""The run database (SQLite): calls of the proxy, plan and progress of the run. Survives kill -9."""

from openforgerl.store.calls import CallStore
from openforgerl.store.database import Database
from openforgerl.store.runs import RunStore, StepRecord

__all__ = ["CallStore", "Database", "RunStore", "StepRecord"]
