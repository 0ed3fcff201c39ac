"""Run ONE attempt: session, sandbox, harness, verdict (DESIGN §4). Start reading at `attempt.execute`."""

from openforgerl.rollout.attempt import AttemptWork, Rooms, execute, run_attempt
from openforgerl.rollout.judging import OnTimeout, RolloutOptions, judge

__all__ = ["AttemptWork", "OnTimeout", "RolloutOptions", "Rooms", "execute", "judge", "run_attempt"]
