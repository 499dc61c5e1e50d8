"""What object stores do wrong, told by a server that follows a script."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from anyshard.errors import BlobExists, CheckpointReplaced, StorageDenied, StorageError, StorageUnavailable, StorageUnguarded
from anyshard.options import MIB
from anyshard.storage.object_store.opening import open_object_store
from anyshard.storage.object_store.store import ObjectStore
from anyshard.testing.store_fixtures import pattern, read_range, write_blob

PART_NBYTES = 5 * MIB
Act = Callable[["Handler"], object]
KEYS = {"access_key_id": "AKIASHOWNNEVER", "secret_access_key": "shown-never", "region": "us-east-1"}
QUICK = {"request_timeout_s": 5.0, "max_attempts": 3, "part_nbytes": PART_NBYTES}


class Server(ThreadingHTTPServer):
    """A small S3: objects, and acts that stand for the answers to the next requests that match a pattern."""

    daemon_threads = True
    request_queue_size = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}
        self.script: list[tuple[str, Act]] = []
        self.seen: list[str] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def open(self, **options: Any) -> ObjectStore:
        """A store on it."""
        given = {"endpoint": f"http://127.0.0.1:{self.server_port}", **KEYS, **QUICK, **options}
        store = open_object_store("s3://b/run", given)
        assert isinstance(store, ObjectStore)
        return store

    def on(self, pattern_: str, *acts: Act) -> None:
        """Answer the next requests "METHOD path?query" that match with these, in turn."""
        self.script.extend((pattern_, act) for act in acts)

    def take(self, line: str) -> Act:
        """What is to be done about this request."""
        with self.lock:
            self.seen.append(line)
            for number, (pattern_, act) in enumerate(self.script):
                if re.search(pattern_, line):
                    del self.script[number]
                    return act
        return Handler.serve

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what this is for."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def handle_one(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.take(f"{self.command} {self.path}")(self)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815 - names that http.server looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named so there
        """Say nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send it all."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def serve(self) -> None:
        """Do what S3 would do."""
        url = urlsplit(self.path)
        query, objects = parse_qs(url.query, keep_blank_values=True), self.server.objects
        if self.command == "PUT" and "partNumber" in query:
            self.server.parts[query["partNumber"][0]] = self.body
            self.answer(200, ETag='"p"')
        elif self.command == "PUT":
            if self.headers.get("if-none-match") and url.path in objects:
                self.answer(412)
            else:
                objects[url.path] = self.body
                self.answer(200, ETag=tag(self.body))
        elif self.command == "POST" and "uploads" in query:
            self.answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        elif self.command == "POST":
            parts = self.server.parts
            objects[url.path] = b"".join(parts[number] for number in sorted(parts, key=int))
            self.answer(200, b"<CompleteMultipartUploadResult><ETag>t</ETag></CompleteMultipartUploadResult>", ETag='"t"')
        elif self.command == "GET" and "uploads" in query:
            upload = b"<Upload><Key>run/data/a</Key><UploadId>u</UploadId><Initiated>2026-11-30T20:00:00Z</Initiated></Upload>"
            self.answer(200, b"<ListMultipartUploadsResult>" + upload + b"</ListMultipartUploadsResult>")
        elif self.command == "DELETE":
            self.server.parts.clear()
            self.answer(204)
        elif url.path in objects:
            self.send_object(objects[url.path])
        else:
            self.answer(404, b"" if self.command == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")

    def send_object(self, data: bytes, cut: int = 0) -> None:
        """Answer HEAD or GET, of which `cut` bytes at the end stay away."""
        facts = {"ETag": tag(data), "Last_Modified": "Mon, 30 Nov 2026 20:00:00 GMT"}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if self.command == "HEAD" or not found:
            self.answer(200, data, Content_Length=str(len(data)), **facts)
            return
        begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
        facts["Content_Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.answer(206, data[begin : end - cut], Content_Length=str(end - begin), **facts)
        self.close_connection = self.close_connection or cut > 0


def tag(data: bytes) -> str:
    """The tag of an object."""
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def status(number: int, code: str = "") -> Act:
    """Answer this."""
    return lambda handler: handler.answer(number, f"<Error><Code>{code}</Code><Message>it says so</Message></Error>".encode())


def reset(handler: Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def lose(handler: Handler) -> None:
    """Do it, but let the answer be lost."""
    kept, handler.wfile = handler.wfile, io.BytesIO()
    handler.serve()
    handler.wfile = kept
    handler.close_connection = True


def garble(handler: Handler) -> None:
    """Answer something that is no HTTP."""
    handler.wfile.write(b"\x15\x03\x03\x00\x02\x02\x50 no http at all\r\n\r\n")
    handler.close_connection = True


def hang(handler: Handler) -> None:
    """Never answer."""
    handler.server.ended.wait(60)
    handler.close_connection = True


def cut(handler: Handler) -> None:
    """Send all but the last 10 bytes."""
    handler.send_object(handler.server.objects[urlsplit(handler.path).path], cut=10)


@pytest.fixture
def server() -> Iterator[Server]:
    """The server, which serves."""
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.ended.set()
        made.shutdown()
        thread.join(10)


def test_passing_faults_are_retried_and_a_refusal_is_not(server: Server) -> None:
    """A reset, an answer that is no HTTP (as TLS to the wrong port gives) and a 500 pass; a 403 fails at once (B049)."""
    server.objects["/b/run/a"] = b"content"
    store = server.open(max_attempts=4)
    server.on("GET", reset, garble, status(500, "InternalError"))
    assert store.read("a", max_nbytes=7) == b"content"
    server.seen.clear()
    server.on("GET", status(403, "AccessDenied"))
    with pytest.raises(StorageDenied, match="could not read s3://b/run/a: 403 Forbidden .AccessDenied: it says so"):
        store.read("a", max_nbytes=7)
    assert server.seen == ["GET /b/run/a"]


@pytest.mark.parametrize("number", [408, 429, 500, 503])
def test_an_outage_ends_with_what_was_tried(server: Server, number: int) -> None:
    """A store that keeps failing is `StorageUnavailable` after `max_attempts`, in one line without URL of the request or keys."""
    server.on("GET", *(status(number, "Busy") for _ in range(9)))
    with pytest.raises(StorageUnavailable, match=f"attempts: 3.*{number}") as caught:
        server.open().read("a", max_nbytes=7)
    text = f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert (len(server.seen), caught.value.attempts, caught.value.file) == (3, 3, "a")
    assert not re.search("127.0.0.1|SHOWNNEVER|shown-never|Debug|\\n", text)


def test_a_lost_answer_is_no_lost_race(server: Server) -> None:
    """`create` whose answer was lost finds its own bytes and succeeds; those of another are `BlobExists` (B5)."""
    store = server.open()
    server.on("PUT", lose)
    store.create("a", b"mine", token="t")
    assert (server.objects["/b/run/a"], len([line for line in server.seen if line.startswith("PUT")])) == (b"mine", 2)
    server.on("PUT", reset)
    with pytest.raises(BlobExists):
        store.create("a", b"other", token="t")
    with pytest.raises(BlobExists):
        store.create("a", b"mine", token="t")


def test_what_cannot_be_read_back_is_no_lost_race(server: Server) -> None:
    """Whether the key is ours is not known then: another one's would be `BlobExists`, this may be sent again."""
    server.on("PUT", lose)
    server.on("GET", *[status(503, "ServiceUnavailable")] * 3)
    with pytest.raises(StorageUnavailable):
        server.open().create("a", b"mine", token="t")


def test_nobody_has_said_who_asks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of an operation that has no credentials from its options says where they may have come from."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    store = server.open(access_key_id=None, secret_access_key=None, anonymous=False)
    server.on("GET", *[status(403, "AccessDenied")] * 3)
    with pytest.raises(StorageDenied, match="No credentials were found in the options"):
        store.list("")


def test_a_conflict_of_writers_is_asked_again(server: Server) -> None:
    """A 409 while another writer is at the key does not say who has won: the next attempt does."""
    server.on("PUT", status(409, "ConditionalRequestConflict"))
    server.open().create("a", b"mine", token="t")
    assert server.objects == {"/b/run/a": b"mine"}


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "NotImplemented")], ids=str)
def test_refused_conditions_are_remembered(server: Server, refusal: tuple[int, str]) -> None:
    """A store without create-if-absent is `StorageUnguarded`, asked once; blobs are then written after a look (B11)."""
    store = server.open()
    server.on("PUT", status(*refusal))
    for _ in range(2):
        with pytest.raises(StorageUnguarded):
            store.create("a", b"x", token="t")
    write_blob(store, "data/a", b"x")
    with pytest.raises(BlobExists):
        write_blob(store, "data/a", b"y")
    assert (store.capabilities.guarded, server.objects) == (False, {"/b/run/data/a": b"x"})
    assert ["PUT /b/run/a", "HEAD /b/run/data/a", "PUT /b/run/data/a", "HEAD /b/run/data/a"] == server.seen


def test_expired_credentials_are_fetched_anew(server: Server) -> None:
    """ExpiredToken makes the client anew, which asks for credentials again, and the request is repeated."""
    tokens: list[str] = []

    def provide() -> dict[str, Any]:
        tokens.append(f"t{len(tokens)}")
        return {"access_key_id": "a", "secret_access_key": "s", "token": tokens[-1], "expires_at": None}

    server.objects["/b/run/a"] = b"x"
    server.on("GET", status(400, "ExpiredToken"))
    options = {name: value for name, value in KEYS.items() if name == "region"}
    url = f"s3://b/run?endpoint=http://127.0.0.1:{server.server_port}"
    assert open_object_store(url, {**options, "credential_provider": provide}).read("a", max_nbytes=1) == b"x"
    assert len(tokens) == 2


def test_a_condition_that_is_never_met_is_left_out(server: Server) -> None:
    """A store that answers 412 though nothing has changed is asked once more what is there, then read without the condition."""
    store = server.open()
    write_blob(store, "data/a", b"content")
    server.on("GET", status(412, "PreconditionFailed"))
    assert read_range(store, "data/a", 3, 4) == b"tent"
    assert [line.partition(" ")[0] for line in server.seen] == ["PUT", "HEAD", "GET", "HEAD", "GET"]


def test_a_body_that_is_cut_is_asked_for_again(server: Server) -> None:
    """Bytes that are missing at the end of an answer are never taken for those of the blob."""
    store, data = server.open(), pattern(100_000)
    write_blob(store, "data/a", data)
    server.on("GET", cut, reset)
    assert data[7:99_000] == read_range(store, "data/a", 7, 98_993)
    server.on("GET", *(cut for _ in range(3)))
    with pytest.raises(StorageUnavailable, match="data/a"):
        read_range(store, "data/a", 7, 98_993)


def test_another_version_is_noticed_without_the_condition(server: Server) -> None:
    """An answer of another version is refused, also by a store that does not look at the condition."""
    store = server.open()
    write_blob(store, "data/a", b"first")
    with store.open_blob("data/a") as reader:
        server.objects["/b/run/data/a"] = b"other"
        with pytest.raises(CheckpointReplaced):
            reader.read_into(0, memoryview(bytearray(5)))


def test_a_short_blob_is_one_request(server: Server) -> None:
    """A blob of up to one part costs one request, a longer one those of its parts and four more (B047)."""
    store = server.open()
    write_blob(store, "data/a", bytes(PART_NBYTES))
    assert server.seen == ["PUT /b/run/data/a"]
    server.seen.clear()
    write_blob(store, "data/b", bytes(2 * PART_NBYTES + 1))
    assert sorted(line.partition(" ")[0] for line in server.seen) == ["HEAD", "HEAD", "POST", "POST", "PUT", "PUT", "PUT"]


def test_parts_fly_together(server: Server) -> None:
    """Of a blob with four streams three parts are under way while the fourth fills (B038)."""
    together = threading.Barrier(3, timeout=30)

    def meet(handler: Handler) -> None:
        together.wait()
        handler.serve()

    server.on("PUT", meet, meet, meet)
    write_blob(server.open(request_timeout_s=30.0), "data/a", bytes(3 * PART_NBYTES))
    assert (len(server.objects["/b/run/data/a"]), together.broken) == (3 * PART_NBYTES, False)


def test_a_long_write_keeps_to_its_streams(server: Server) -> None:
    """One write of many parts has no more of them under way than many short ones: four never meet where three may fly."""
    together = threading.Barrier(4, timeout=1)

    def try_to_meet(handler: Handler) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()
        handler.serve()

    server.on("PUT", *(try_to_meet for _ in range(8)))
    with server.open(request_timeout_s=30.0).create_blob("data/a", nbytes=8 * PART_NBYTES) as writer:
        writer.write_at(0, memoryview(bytes(8 * PART_NBYTES)))
        writer.finish()
    assert (len(server.objects["/b/run/data/a"]), together.broken) == (8 * PART_NBYTES, True)


def test_many_blobs_at_once_wait_for_their_turn(server: Server) -> None:
    """A hundred objects at a server that serves two at a time: time-outs begin when a request does, all arrive (B044)."""
    turns, most, now = threading.BoundedSemaphore(2), [0], [0]

    def wait_for_turn(handler: Handler) -> None:
        with server.lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        with turns:
            handler.serve()
        with server.lock:
            now[0] -= 1

    store = server.open(max_requests=8)
    server.on("PUT", *(wait_for_turn for _ in range(100)))
    with ThreadPoolExecutor(100) as pool:
        list(pool.map(lambda number: write_blob(store, f"data/{number}", bytes(number * 20_000)), range(100)))
    assert ([number * 20_000 for number in range(100)], most[0] <= 8) == (
        [len(server.objects[f"/b/run/data/{number}"]) for number in range(100)],
        True,
    )


def test_a_part_that_is_never_answered_fails_in_the_end(server: Server) -> None:
    """The error names object and part, the upload is aborted, and nothing is there (B046)."""
    server.on("partNumber=2", hang, hang, hang)
    with pytest.raises(StorageUnavailable, match="data/a: part 2: .*Each request .* up to 3 times .*at most 0.5 s"):
        write_blob(server.open(request_timeout_s=0.5), "data/a", bytes(3 * PART_NBYTES))
    assert (server.objects, server.seen[-1].partition("?")[0]) == ({}, "DELETE /b/run/data/a")


@pytest.mark.parametrize("is_error", [True, False], ids=["error", "nothing"])
def test_an_upload_is_done_only_when_it_is_there(server: Server, is_error: bool) -> None:
    """A 200 that holds an error, or after which nothing is there, is no success (B010, B046)."""
    code = b"<Error><Code>InternalError</Code><Message>no</Message></Error>"
    good = b"<CompleteMultipartUploadResult><ETag>t</ETag></CompleteMultipartUploadResult>"
    lie: Act = lambda handler: handler.answer(200, code if is_error else good, ETag='"t"')  # noqa: E731 - a table of one
    server.on("POST .*uploadId", *(lie for _ in range(9)))
    with pytest.raises(StorageUnavailable, match="data/a"):
        write_blob(server.open(), "data/a", bytes(2 * PART_NBYTES))
    assert server.objects == {}


def test_a_lost_answer_to_the_end_of_an_upload_is_a_success(server: Server) -> None:
    """When the object is there with its length, it does not matter what was heard of it."""
    server.on("POST .*uploadId", lose, status(404, "NoSuchUpload"))
    write_blob(server.open(), "data/a", bytes(2 * PART_NBYTES))
    assert len(server.objects["/b/run/data/a"]) == 2 * PART_NBYTES


def test_a_bulk_deletion_that_a_store_lacks(server: Server) -> None:
    """The error says what the store refused."""
    server.on("POST", status(501, "NotImplemented"))
    with pytest.raises(StorageError, match="could not delete .*501.*NotImplemented"):
        server.open().delete(("data/a",))
    assert server.seen == ["POST /b?delete"]
