"""How saves and loads grow with streams to a store whose requests take long, each at the rate of one connection. JSON lines.

    python benchmarks/streams.py [--nbytes 1e9] [--repeats 5] [--streams 1,16] [--block-mib 8] [--latency-s 0.02] [--rate 50e6]

The store is memory behind a latency per request and a rate per stream; it sleeps, so as many streams as there are threads add up
as far as the rest of the work lets them. Writes go in any order (`parallel_writes`), or front to back in blobs of `--blob-mib`.
`raw` does the same requests with threads that do nothing else: what the store itself gives here. `of_ideal` compares with a
machine on which nothing but the store takes time. All cases take turns, the first round is thrown away. `scale` is the median
speed over that with the fewest streams. The store's memory is used again from round to round (Linux with glibc).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from measure import MIB
from save_load import count_nbytes, make_state

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import CountingStore, LatencyStore, SequentialStore, ThrottledStore, Verb

State = Mapping[str, object]

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of glibc's mallopt


@dataclass(frozen=True, slots=True)
class Network:
    """What one request takes, and what one stream moves."""

    latency_s: float
    nbytes_per_s: float

    def reach(self, memory: MemoryStore) -> Store:
        """The store behind it."""
        return LatencyStore(ThrottledStore(memory, nbytes_per_s=self.nbytes_per_s), dict.fromkeys(Verb, self.latency_s))

    def ideal_s(self, nbytes: int, *, num_streams: int, block_nbytes: int) -> float:
        """Seconds for requests of a block each, if nothing but these takes time."""
        return (nbytes / self.nbytes_per_s + nbytes / block_nbytes * self.latency_s) / num_streams


@dataclass(slots=True)
class Case:
    """One way to move the state, with so many streams; `run` gives the store that counted, and its seconds are noted."""

    name: str
    num_streams: int
    run: Callable[[], CountingStore]
    seconds: list[float] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)

    def time(self) -> None:
        """Once more."""
        began = time.perf_counter()
        store = self.run()
        self.seconds.append(time.perf_counter() - began)
        self.requests = {verb: count for verb in Verb if (count := store.count(verb).calls)}


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases share."""

    state: State
    nbytes: int
    network: Network
    block_nbytes: int
    blob_nbytes: int

    def list_cases(self, num_streams: int) -> list[Case]:
        """Raw, then ours."""
        saved = MemoryStore()  # what the load cases read
        anyshard.save(saved, self.state)
        cases = {
            "raw write": partial(self.write_raw, num_streams),
            "raw read": partial(self.read_raw, num_streams, saved),
            "save, any order": partial(self.save, num_streams, wrap=_leave),
            "save, front to back": partial(self.save, num_streams, wrap=SequentialStore),
            "load": partial(self.load, num_streams, saved),
        }
        return [Case(name, num_streams, run) for name, run in cases.items()]

    def save(self, num_streams: int, *, wrap: Callable[[Store], Store]) -> CountingStore:
        """Ours, into an empty store."""
        store = CountingStore(wrap(self.network.reach(MemoryStore())))
        options = anyshard.SaveOptions(
            threads=num_streams,
            block_nbytes=self.block_nbytes,
            byte_budget=2 * num_streams * self.block_nbytes,
            max_blob_nbytes=self.blob_nbytes,
        )
        anyshard.save(store, self.state, options=options)
        return store

    def load(self, num_streams: int, saved: MemoryStore) -> CountingStore:
        """Ours, into the tensors that are there."""
        store = CountingStore(self.network.reach(saved))
        options = anyshard.LoadOptions(
            threads=num_streams, block_nbytes=self.block_nbytes, byte_budget=2 * num_streams * self.block_nbytes
        )
        anyshard.load(store, self.state, options=options)
        return store

    def write_raw(self, num_streams: int) -> CountingStore:
        """As many bytes in the same blobs, each stream one after the other."""
        store = CountingStore(self.network.reach(MemoryStore()))
        block = memoryview(bytearray(self.block_nbytes))
        whole, rest = divmod(self.nbytes, self.blob_nbytes)

        def write_blob(number: int) -> None:
            nbytes = self.blob_nbytes if number < whole else rest
            with store.create_blob(f"data/{number}", nbytes=nbytes) as writer:
                for position in range(0, nbytes, len(block)):
                    writer.write_at(position, block[: min(len(block), nbytes - position)])
                writer.finish()

        with ThreadPoolExecutor(num_streams) as pool:
            list(pool.map(write_blob, range(whole + bool(rest))))
        return store

    def read_raw(self, num_streams: int, saved: MemoryStore) -> CountingStore:
        """The longest blob, a block by each stream in turn."""
        store = CountingStore(self.network.reach(saved))
        reader = store.open_blob(max((key for key in saved.snapshot()), key=lambda key: len(saved.snapshot()[key])))
        spans = [(at, min(self.block_nbytes, reader.nbytes - at)) for at in range(0, reader.nbytes, self.block_nbytes)]

        def work(number: int) -> None:
            block = memoryview(bytearray(self.block_nbytes))
            for position, nbytes in spans[number::num_streams]:
                reader.read_into(position, block[:nbytes])

        with reader, ThreadPoolExecutor(num_streams) as pool:
            list(pool.map(work, range(num_streams)))
        return store

    def report(self, cases: Sequence[Case]) -> None:
        """One line per case."""
        fewest = min(case.num_streams for case in cases)
        alone = {case.name: statistics.median(case.seconds) for case in cases if case.num_streams == fewest}
        for case in cases:
            median = statistics.median(case.seconds)
            ideal_s = self.network.ideal_s(self.nbytes, num_streams=case.num_streams, block_nbytes=self.block_nbytes)
            line = {
                "name": case.name,
                "streams": case.num_streams,
                "block_mib": self.block_nbytes / MIB,
                "seconds": round(median, 3),
                "mb_per_s": round(self.nbytes / median / 1e6, 1),
                "slowest": round(self.nbytes / max(case.seconds) / 1e6, 1),
                "fastest": round(self.nbytes / min(case.seconds) / 1e6, 1),
                "scale": round(alone[case.name] / median, 2),
                "of_ideal": round(ideal_s / median, 2),
                "requests_per_gb": {verb: round(count / self.nbytes * 1e9, 1) for verb, count in case.requests.items()},
                "repeats": len(case.seconds),
            }
            print(json.dumps(line), flush=True)


def _leave(store: Store) -> Store:
    return store


def keep_memory() -> None:
    """Have what is freed used again: the first touch of fresh pages by the store would take longer than the rest."""
    glibc = ctypes.CDLL(None)
    for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        glibc.mallopt(parameter, value)


def main() -> None:
    """Run everything in memory: five times the state, at most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", default="1,16", help="numbers of streams, with commas between")
    parser.add_argument("--block-mib", type=float, default=8)
    parser.add_argument("--blob-mib", type=float, default=64)
    parser.add_argument("--latency-s", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=50e6, help="bytes per second and stream")
    parser.add_argument("--only", default="", help="only cases whose names begin so, with semicolons between")
    options = parser.parse_args()
    keep_memory()
    state = make_state(int(options.nbytes))
    network = Network(options.latency_s, options.rate)
    sizes = int(options.block_mib * MIB), int(options.blob_mib * MIB)
    bench = Bench({"model": state}, count_nbytes(state), network, *sizes)
    only = tuple(options.only.split(";"))
    cases = [case for num in map(int, options.streams.split(",")) for case in bench.list_cases(num) if case.name.startswith(only)]
    for _ in range(options.repeats + 1):
        for case in cases:
            case.time()
    for case in cases:
        del case.seconds[0]
    bench.report(cases)


if __name__ == "__main__":
    main()
