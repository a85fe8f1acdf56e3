"""Who computes which features, and when.

ledger    the state of every pack that a trainer rank wants now: wanted → leased → stored → consumed
server    the ledger over HTTP                     client     its callers' side
producer  lease → compute → put → stored           sources    want → get → verify → consumed
consumer  prefetching in the background            cache      feature files: offline and hybrid sources
"""

from __future__ import annotations

from ..errors import UserError


class StreamError(UserError):
    """The stream cannot go on: a pack that no attempt could produce, no progress, or a ledger that does not answer."""
