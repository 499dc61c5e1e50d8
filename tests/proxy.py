"""A proxy before an HTTP server that misbehaves as it is told, in a process of its own.

    with run_proxy(server.endpoint) as proxy:
        options = server.options | {"endpoint": proxy.endpoint}
        proxy.set(Faults(cut_after=(0, 1 << 20), seed=7))                   # each connection is reset within its first MiB
        proxy.set(Faults(rules=[Rule("PUT .*manifest", "lose")]))           # the answer to one PUT is lost: the server has it
        proxy.set(Faults(rules=[Rule("", 503, times=5)]))                   # five requests are answered by the proxy
        proxy.set(Faults())                                                 # all is well
        assert proxy.count().requests["PUT"] == 3

Faults hold from the next bytes on, on connections that are open as well. It ends with its `with` block or with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, NoReturn, final
from urllib.parse import urlsplit

_HOST: Final = "127.0.0.1"
_CHUNK_NBYTES: Final = 1 << 16
_POLL_S: Final = 0.005
_ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to requests of which `pattern` is found in `METHOD /path?query`: to `times` of them, after `skip` of them.

    A number answers with that status and does not ask the server. "lose" sends the request on, drops the answer and resets the
    connection. "cut" resets the connection instead of sending it on. "hang" sends it on, and no answer ever comes.
    """

    pattern: str
    action: int | Literal["lose", "cut", "hang"]
    skip: int = 0
    times: int = 1
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Faults:
    """How the proxy misbehaves.

    `latency_s` is added to each request, `chunk_latency_s` to each 64 KiB. `cut_after` resets a connection after a number of
    bytes, both ways together, that is drawn between two bounds from `seed`; `hang_after` lets nothing pass after that many.
    Both are for every `every`-th connection. `rules` are about requests: the first that matches and is not used up counts.
    """

    latency_s: float = 0.0
    chunk_latency_s: float = 0.0
    bytes_per_s: float | None = None  # each way of each connection
    cut_after: tuple[int, int] | None = None
    hang_after: int | None = None
    every: int = 1
    seed: int = 0
    rules: list[Rule] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counts:
    """What has passed since the proxy started."""

    connections: int
    nbytes: int  # both ways together
    requests: dict[str, int]  # by method, zero for those that never came
    faults: dict[str, int]  # by kind: cut, hang, lose, answered


@final
class Proxy:
    """A running proxy. Any thread may call.

    Attributes:
        endpoint: URL of the server behind it, by way of it.
    """

    def __init__(self, endpoint: str, process: subprocess.Popen[str]) -> None:
        self.endpoint = endpoint
        self._process, self._lock = process, threading.Lock()

    def set(self, faults: Faults) -> None:
        """Misbehave in this way from now on, and no more as before."""
        self._ask(asdict(faults))

    def count(self) -> Counts:
        """What has passed until now."""
        counts = self._ask(None)
        return Counts(counts["connections"], counts["nbytes"], Counter(counts["requests"]), Counter(counts["faults"]))

    def wait_until(self, condition: Callable[[Counts], bool], *, timeout_s: float = 60.0) -> None:
        """Returns as soon as what has passed is as wanted."""
        deadline = time.monotonic() + timeout_s
        while not condition(counts := self.count()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the proxy did not come to the wanted state in {timeout_s} s: {counts}")
            threading.Event().wait(_POLL_S)

    def _ask(self, question: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return _read_answer(self._process)


@contextlib.contextmanager
def run_proxy(endpoint: str, faults: Faults | None = None) -> Iterator[Proxy]:
    """A proxy before the server at `endpoint`."""
    target = urlsplit(endpoint)
    command = [sys.executable, "-m", "tests.proxy", str(target.hostname), str(target.port)]
    # It ends when its input does, so at the latest with this process.
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            port = _read_answer(process)["port"]
            proxy = Proxy(target._replace(netloc=f"{_HOST}:{port}").geturl(), process)
            if faults is not None:
                proxy.set(faults)
            yield proxy
        finally:
            process.kill()


def _read_answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the proxy ended with {process.wait()}")
    return json.loads(line)


# The process ---------------------------------------------------------------------------------------------------------------


class _CutError(ConnectionError):
    """This connection is to be reset."""


@final
class _Service:
    """The proxy in its own process: the faults of now, and the counts."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.faults, self.generation = Faults(), 0
        self.connections, self.nbytes = 0, 0
        self.requests: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._seen: Counter[int] = Counter()

    async def run(self, commands: IO[str]) -> None:
        """Serve until the commands end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), commands)
        server = await asyncio.start_server(self._serve, _HOST, 0)
        print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
        while line := await reader.readline():
            if (wanted := json.loads(line)) is not None:
                self.faults = Faults(**wanted | {"rules": [Rule(**rule) for rule in wanted["rules"]]})
                self.generation += 1
                self._seen.clear()
            counts = {"connections": self.connections, "nbytes": self.nbytes, "requests": self.requests, "faults": self.counts}
            print(json.dumps(counts), flush=True)

    def choose(self, request: str) -> Rule | None:
        """The rule for a request that has come."""
        for number, rule in enumerate(self.faults.rules):
            if re.search(rule.pattern, request):
                self._seen[number] += 1
                if rule.skip < self._seen[number] <= rule.skip + rule.times:
                    return rule
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            upstream = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        await _Connection(self, (reader, writer), upstream).serve()


@final
class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(
        self,
        service: _Service,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._service, self._number = service, service.connections
        self._reader, self._writer = client
        self._up_reader, self._up_writer = upstream
        self._rule: Rule | None = None  # of the request whose answer is awaited
        self._generation = -1
        self._left: float = 0.0  # bytes until the fault of this connection

    async def serve(self) -> None:
        """Pass requests and answers until one side ends or a fault comes."""
        pumps = [asyncio.create_task(self._pump_requests()), asyncio.create_task(self._pump_answers())]
        done, pending = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for writer in (self._writer, self._up_writer):
            if any(errors):
                _reset(writer)
            else:
                writer.close()
        for error in errors:
            if error is not None and not isinstance(error, ConnectionError | asyncio.IncompleteReadError):
                raise error

    async def _pump_requests(self) -> None:
        while not self._reader.at_eof():
            try:
                head = await self._reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                return
            await self._pass_request(head)

    async def _pass_request(self, head: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        self._service.requests[method] += 1
        await asyncio.sleep(self._service.faults.latency_s)
        self._rule = rule = self._service.choose(f"{method} {path}")
        if rule is not None and rule.action == "cut":
            self._cut("cut")
        if rule is not None and isinstance(rule.action, int):
            await self._answer(rule, rule.action, head, has_body=method != "HEAD")
            return
        await self._send(head, self._up_writer)
        async for data in _read_body(self._reader, head):
            await self._send(data, self._up_writer)

    async def _answer(self, rule: Rule, status: int, head: bytes, *, has_body: bool) -> None:
        """Answer for the server, which never hears of it."""
        self._service.counts["answered"] += 1
        if b"100-continue" not in head.lower():  # else the client waits for leave to send the body
            async for _ in _read_body(self._reader, head):
                pass
        body = b"<Error><Code>Injected</Code></Error>"
        lines = [f"HTTP/1.1 {status} Injected", "Content-Type: application/xml", f"Content-Length: {len(body) * has_body}"]
        if rule.retry_after_s is not None:
            lines.append(f"Retry-After: {rule.retry_after_s}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body * has_body)
        await self._writer.drain()

    async def _pump_answers(self) -> None:
        while data := await self._up_reader.read(_CHUNK_NBYTES):
            if self._rule is not None and not data.startswith(b"HTTP/1.1 100"):
                await self._drop_answer(self._rule)
            await self._send(data, self._writer)

    async def _drop_answer(self, rule: Rule) -> None:
        if rule.action == "lose":
            self._cut("lose")
        if rule.action == "hang":
            await self._hang()

    async def _send(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on, as slowly as told, and as far as told."""
        faults = self._service.faults
        if faults.chunk_latency_s or faults.bytes_per_s:
            await asyncio.sleep(faults.chunk_latency_s + len(data) / (faults.bytes_per_s or float("inf")))
        if self._generation != self._service.generation:
            self._generation, self._left = self._service.generation, self._draw()
        is_last = self._left < len(data)
        passed = data[: int(self._left)] if is_last else data
        self._left -= len(passed)
        self._service.nbytes += len(passed)
        writer.write(passed)
        await writer.drain()
        if is_last and self._service.faults.hang_after is not None:
            await self._hang()
        if is_last:
            self._cut("cut")

    def _draw(self) -> float:
        """How many bytes may pass under the faults of now."""
        faults = self._service.faults
        if self._number % faults.every:
            return float("inf")
        if faults.cut_after is not None:
            return random.Random(f"{faults.seed}-{self._number}").randint(*faults.cut_after)
        return float("inf") if faults.hang_after is None else faults.hang_after

    def _cut(self, kind: str) -> NoReturn:
        self._service.counts[kind] += 1
        raise _CutError

    async def _hang(self) -> None:
        self._service.counts["hang"] += 1
        await asyncio.Event().wait()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """The bytes of a request's body as they lie on the wire."""
    headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"chunked" in headers.get(b"transfer-encoding", b""):
        size = -1
        while size != 0:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
        return
    left = int(headers.get(b"content-length", b"0"))
    while left:
        data = await reader.read(min(left, _CHUNK_NBYTES))
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        yield data


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset, as a crash or a firewall does, and not in order."""
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


if __name__ == "__main__":
    asyncio.run(_Service(sys.argv[1], int(sys.argv[2])).run(sys.stdin))
