"""`python dying.py FOLDER KUBECONFIG`: a run whose process dies when the first harness has ended, once.

Its program's end has been heard and acknowledged by then, and no outcome is stored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import storm  # of this folder, which is this script's

from openforgerl.types import Ending, Exit, ModelCall

FOLDER = Path(sys.argv[1])


class DyingHarness(storm.StormHarness):
    """Kills its process in the moment in which it is asked how the harness ended."""

    def ending(self, exit: Exit, calls: Sequence[ModelCall]) -> Ending:
        if not (FOLDER / "died").exists():
            (FOLDER / "died").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().ending(exit, calls)


storm.StormHarness = DyingHarness
done = asyncio.run(storm.live(FOLDER, Path(sys.argv[2]), 1, storm.GROUP))
print(len(done))
