"""Harnesses whose last words are kept in `answer.txt`: what a model says is graded, so any model can do better."""

from __future__ import annotations

import shlex

import msgspec

from openforgerl.harnesses.pi import PiHarness
from openforgerl.harnesses.react import ReactHarness
from openforgerl.types import HarnessContext, Plan

BROKEN = "trl/task-broken"
"""Its rollouts always fail."""


class SayingReact(ReactHarness):
    """What it says goes to the working directory, where the verifier looks."""

    def plan(self, context: HarnessContext) -> Plan:
        plan = super().plan(context)
        if context.rollout.task == BROKEN:
            return msgspec.structs.replace(plan, argv=("/bin/sh", "-c", "kill -KILL $$"))
        return _kept(plan, context)


class SayingPi(PiHarness):
    """The same with pi."""

    def plan(self, context: HarnessContext) -> Plan:
        return _kept(super().plan(context), context)


def _kept(plan: Plan, context: HarnessContext) -> Plan:
    words = f"{shlex.join(plan.argv)} >{context.workdir}/answer.txt"
    return msgspec.structs.replace(plan, argv=("/bin/sh", "-c", words))
