"""Which replica answers: the one that has the session's prefix in its cache, as long as it lives."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NO_VERSION = -1
"""Of a replica that is not asked until a weight update has reached it."""


@dataclass(slots=True)
class Replica:
    """One server."""

    url: str
    version: int = 0
    """Of the weights that it has."""
    down_until: float = 0.0
    """Not asked before then (by the clock of `Replicas`)."""
    failures: int = 0
    """In a row."""
    last_error: str = ""
    in_flight: int = 0


@dataclass(slots=True)
class Replicas:
    """Replicas of one model. A session stays with one replica; when that one fails, with the next of its own order.

    The order is by rendezvous hashing: a replica that goes or comes moves only its own sessions.
    """

    all: Sequence[Replica]
    retry_seconds: float
    """A failed replica is left alone for so long; doubled with every further failure, to 32 times."""
    clock: Callable[[], float] = time.monotonic
    version: int = field(default=0)
    """Of the weights that are served. A replica that has others is not asked, whatever its health."""

    def choose(self, session: str, tried: Sequence[Replica] = ()) -> Replica | None:
        """The first in the session's order that may be asked and was not tried; None when there is none."""
        order = sorted(self.all, key=lambda replica: _weight(session, replica.url), reverse=True)
        now = self.clock()
        fit = [one for one in order if one.version == self.version and one not in tried]
        return next((replica for replica in fit if replica.down_until <= now), None)

    def failed(self, replica: Replica, why: str) -> None:
        """It could not be reached, or broke off."""
        replica.failures += 1
        replica.last_error = why
        replica.down_until = self.clock() + self.retry_seconds * 2 ** min(replica.failures - 1, 5)

    def answered(self, replica: Replica) -> None:
        """It did its work."""
        replica.failures = 0
        replica.down_until = 0.0

    def wait(self) -> float:
        """Seconds until some replica may be asked again; 0 when one may be asked now."""
        fit = [replica.down_until for replica in self.all if replica.version == self.version]
        return max(0.0, min(fit) - self.clock()) if fit else self.retry_seconds

    def words(self) -> str:
        """What is wrong with them, for an error."""
        return "; ".join(f"{one.url}: {one.last_error or 'it has not got the current weights'}" for one in self.all)


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\x1f{url}".encode(), digest_size=16).digest()
