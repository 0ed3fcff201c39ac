"""pi, run twice in one attempt, with two planted faults: what the tests of veRL put behind the proxy.

The second run goes on with the first one's session under another system prompt, so its prompt does not begin with
what was sampled before: the attempt has two sequences.
"""

from __future__ import annotations

import shlex

import msgspec

from openforgerl.harnesses.options import HarnessOptions
from openforgerl.harnesses.pi import PiHarness
from openforgerl.types import HarnessContext, Plan

FAILS_ONCE = "verl/task-1"
"""Its rollout of index 1 fails the first time in every step."""
ALWAYS_FAILS = "verl/task-broken"


class TwicePi(PiHarness):
    """What pi says is the answer that the verifier grades."""

    def __init__(self, options: HarnessOptions | None = None) -> None:
        super().__init__(options)
        self._failed: set[str] = set()

    def plan(self, context: HarnessContext) -> Plan:
        plan = super().plan(context)
        rollout = context.rollout
        if rollout.task == ALWAYS_FAILS or self._fails_now(rollout.task, rollout.index, rollout.rollout_id):
            return msgspec.structs.replace(plan, argv=("/bin/sh", "-c", "kill -KILL $$"))
        once = [word for word in plan.argv if word != "--no-session"]
        flags = once.index("-p") + 1
        again = [*once[:flags], "--continue", "--append-system-prompt", "Say it again.", *once[flags:]]
        answer = f"{context.workdir}/answer.txt"
        script = f"{shlex.join(once)} >{answer}; {shlex.join(again)} | tee -a {answer}"
        return msgspec.structs.replace(plan, argv=("/bin/sh", "-c", script))

    def _fails_now(self, task: str, index: int, rollout_id: str) -> bool:
        if task != FAILS_ONCE or index != 1 or rollout_id in self._failed:
            return False
        self._failed.add(rollout_id)
        return True
