"""Save and load of FSDP2 on 4 ranks to and from an S3 server, beside raw requests and PyTorch DCP. JSON lines.

    python benchmarks/object_store.py [--nbytes 1e9] [--repeats 5] [--root DIRECTORY] [--options JSON]

The server is SeaweedFS on this machine with its data in memory (some 8 times `nbytes`), so it computes on the same cores. All
cases take turns, after a first round that is thrown away. Every save goes to a new bucket, of which our processes know that it is
guarded, as they do after their first save. DCP writes and reads by the connector of AWS and by fsspec with s3fs, each with
several settings; raw is an upload, or ranged reads, of as many bytes by each of 4 processes at once, with parts and ranges as
large as ours. References are the best of the settings tried. Needs `pip install s3torchconnector[dcp] s3fs`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_job
import store_job
from measure import Case, best_of, report, time_cases
from store_job import Peer
from store_servers import Buckets, run_buckets

from anyshard.testing.world import World

SIZE = 4
MIB = 1 << 20
PART_NBYTES = 16 * MIB  # what we take for blobs of this length
DCP_THREADS = (1, 2, 4)
DCP_PARTS = (None, PART_NBYTES)
RAW_STREAMS = (1, 2, 4, 8)
TIMEOUT_S = 600

PEERS = [Peer(client, threads, part) for client in ("connector", "fsspec") for threads in DCP_THREADS for part in DCP_PARTS]
# What a save has used other parts for looks the same, and the connector has two further ways to read.
READERS = [*PEERS, *(Peer("connector", 1, None, reader) for reader in ("sequential", "range_based"))]


@dataclass(frozen=True, slots=True)
class Bench:
    """Ranks, the size of their job, and the server. `options` are ours and raw's, beyond what reaches the server."""

    world: World
    num_blocks: int
    buckets: Buckets
    options: Mapping[str, Any]

    def run(self, case: Callable[..., object], *args: object) -> list[Any]:
        """Run a case about the job."""
        return self.world.run(case, self.num_blocks, *args, timeout_s=TIMEOUT_S)

    def save(self, purpose: str) -> list[bool]:
        """Our save."""
        return self.run(store_job.save, self.buckets.url(purpose), self._ours())

    def meet(self, purpose: str) -> None:
        """Empty the bucket, and let our processes find out what its store can do, as they do once."""
        self.buckets.renew(purpose)
        self.run(store_job.meet, f"{self.buckets.url(purpose)}-met", self._ours())

    def load(self, purpose: str) -> None:
        """Our load."""
        self.run(store_job.load, self.buckets.url(purpose), self._ours())

    def save_with_dcp(self, peer: Peer, purpose: str) -> None:
        """A peer's save."""
        self.run(store_job.save_with_dcp, self.buckets.url(purpose), self.buckets.options, store_job.plain(peer))

    def load_with_dcp(self, peer: Peer, purpose: str) -> None:
        """A peer's load."""
        self.run(store_job.load_with_dcp, self.buckets.url(purpose), self.buckets.options, store_job.plain(peer))

    def put_raw(self, num_streams: int, purpose: str) -> None:
        """An upload by each rank."""
        self.run(store_job.put_raw, self.buckets.names[purpose], self._raw(), PART_NBYTES, num_streams)

    def get_raw(self, num_streams: int, purpose: str) -> None:
        """Ranged reads by each rank."""
        self.run(store_job.get_raw, self.buckets.names[purpose], self._raw(), num_streams)

    def _ours(self) -> dict[str, Any]:
        return self.buckets.options | dict(self.options)

    def _raw(self) -> dict[str, Any]:
        return self.buckets.options | {name: value for name, value in self.options.items() if name == "unsigned_payload"}


def save_cases(bench: Bench) -> list[Case]:
    """Raw uploads, our save, DCP's saves, each into an empty bucket."""
    empty = partial(bench.buckets.renew, "scratch")
    return [
        *(Case(f"raw put, {n} streams per rank", partial(bench.put_raw, n, "scratch"), empty) for n in RAW_STREAMS),
        Case("anyshard save", partial(bench.save, "scratch"), partial(bench.meet, "scratch")),
        *(Case(f"dcp save, {peer}", partial(bench.save_with_dcp, peer, "scratch"), empty) for peer in PEERS),
    ]


def load_cases(bench: Bench) -> list[Case]:
    """Raw ranged reads, our load, DCP's loads of what one of its saves with as many threads has stored."""
    return [
        *(Case(f"raw get, {n} streams per rank", partial(bench.get_raw, n, "raw"), _nothing) for n in RAW_STREAMS),
        Case("anyshard load", partial(bench.load, "ours"), _nothing),
        *(Case(f"dcp load, {peer}", partial(bench.load_with_dcp, peer, _kept(peer)), _nothing) for peer in READERS),
    ]


def _nothing() -> None:
    pass


def _kept(peer: Peer) -> str:
    return f"dcp-{peer.threads}"


def store_kept(bench: Bench) -> None:
    """Store what the load cases read, and prove that what is timed saves and loads: all bits come back, with every setting."""
    expected = bench.run(fsdp_job.fill_state)
    for purpose in ("first", "ours", "raw"):
        bench.buckets.renew(purpose)
    bench.save("first")
    assert all(bench.save("ours")), "the second save found no cached plan"
    bench.put_raw(1, "raw")
    for threads in DCP_THREADS:
        peer = Peer("connector", threads)
        bench.buckets.renew(_kept(peer))
        bench.save_with_dcp(peer, _kept(peer))
    check_loads(bench, expected, "anyshard", partial(bench.load, "ours"))
    for reader in READERS:
        check_loads(bench, expected, str(reader), partial(bench.load_with_dcp, reader, _kept(reader)))
    bench.buckets.renew("first")
    bench.save_with_dcp(Peer("fsspec", 2, PART_NBYTES), "first")
    check_loads(bench, expected, "fsspec's own", partial(bench.load_with_dcp, Peer("fsspec", 2), "first"))
    bench.buckets.delete("first")


def check_loads(bench: Bench, expected: list[Any], name: str, load: Callable[[], None]) -> None:
    """Forget everything, load, compare."""
    bench.run(fsdp_job.forget_state)
    load()
    assert expected == bench.run(fsdp_job.sum_state), name


def report_all(seconds: Mapping[str, list[float]], nbytes: int) -> None:
    """One line per case."""
    for name, values in seconds.items():
        raw, verb = ("raw put", "save") if "save" in name or "put" in name else ("raw get", "load")
        peers = {client: best_of(seconds, f"dcp {verb}, {client}") for client in ("connector", "fsspec")}
        references = {"raw": best_of(seconds, raw), **peers, "dcp": min(peers.values())}
        report(name, values, nbytes, **(references if name.startswith("anyshard") else {"raw": references["raw"]}))


def main() -> None:
    """Run everything on a server of its own, which ends with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, help="where the server's data goes; memory if not given")
    parser.add_argument("--server-cores", type=int, default=2, help="on how many cores the server may compute at once")
    parser.add_argument("--options", type=json.loads, default={}, help='further storage options, as {"unsigned_payload": true}')
    parser.add_argument(
        "--only", default="", help="only cases whose names begin so, with | between; ratios need one of each kind"
    )
    options = parser.parse_args()
    num_blocks = max(1, round(options.nbytes / fsdp_job.BLOCK_STATE_NBYTES))
    with run_buckets(options.root, num_cores=options.server_cores) as buckets, World(SIZE) as world:
        bench = Bench(world, num_blocks, buckets, options.options)
        nbytes = sum(bench.run(fsdp_job.count_nbytes))
        store_kept(bench)
        cases = [
            case for case in (*save_cases(bench), *load_cases(bench)) if case.name.startswith(tuple(options.only.split("|")))
        ]
        seconds = time_cases(cases, repeats=options.repeats)
    report_all(seconds, nbytes)


if __name__ == "__main__":
    main()
