"""Stores around stores: deadlines, faults, latency, counting, throttling, order of writes.

Each changes one thing and forwards the rest.
"""

from anyshard.storage.wrappers.counting import Count, CountingStore
from anyshard.storage.wrappers.faults import Action, FaultStore, Rule, answer, do_before, fail, flip_bit, lose_answer, read_short
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore
from anyshard.storage.wrappers.latency import LatencyStore
from anyshard.storage.wrappers.sequential import SequentialStore
from anyshard.storage.wrappers.throttle import ThrottledStore
from anyshard.storage.wrappers.timed import TimedStore

__all__ = [
    "Action",
    "Call",
    "Count",
    "CountingStore",
    "FaultStore",
    "LatencyStore",
    "Rule",
    "SequentialStore",
    "ThrottledStore",
    "TimedStore",
    "Verb",
    "WrapperStore",
    "answer",
    "do_before",
    "fail",
    "flip_bit",
    "lose_answer",
    "read_short",
]
