"""Direct I/O of the local store: when it is taken, what happens where it is refused, and that mixing it never shows."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.storage.local import LocalStore
from anyshard.storage.posix.syscalls import DIRECT_ALIGNMENT, reopen_direct
from anyshard.testing.store_fixtures import pattern, read_range, write_blob

NBYTES = 4 * DIRECT_ALIGNMENT
Call = tuple[bool, int]


def memory(data: bytes, *, shift: int = 0) -> memoryview:
    """A copy of `data` that starts `shift` bytes behind the start of a page."""
    pages = mmap.mmap(-1, len(data) + DIRECT_ALIGNMENT)
    pages[shift : shift + len(data)] = data
    return memoryview(pages)[shift : shift + len(data)]


def is_direct(descriptor: int) -> bool:
    """Whether a descriptor was opened for direct I/O."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    descriptor = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    direct = reopen_direct(descriptor, os.O_RDWR)
    os.close(descriptor)
    if direct is None:
        pytest.skip("the filesystem of the test directory takes no direct I/O")
    os.close(direct)
    store = LocalStore(tmp_path)
    store.prepare(())
    return store


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every pwrite: whether it was direct, and how many bytes it was asked for."""
    calls: list[Call] = []
    pwrite = os.pwrite

    def record(descriptor: int, view: memoryview, position: int) -> int:
        calls.append((is_direct(descriptor), view.nbytes))
        return pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", record)
    return calls


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every preadv: whether it was direct, and how many bytes it was asked for."""
    calls: list[Call] = []
    preadv = os.preadv

    def record(descriptor: int, views: list[memoryview], position: int) -> int:
        calls.append((is_direct(descriptor), views[0].nbytes))
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", record)
    return calls


def test_aligned_writes_are_direct(store: LocalStore, writes: list[Call]) -> None:
    """Memory, position and length on page borders: one direct write."""
    with store.create_blob("a", nbytes=NBYTES) as writer:
        writer.write_at(0, memory(pattern(NBYTES)))
        writer.finish()
    assert [(True, NBYTES)] == writes
    assert pattern(NBYTES) == store.read("a", max_nbytes=NBYTES)


def test_write_off_the_border_is_buffered(store: LocalStore, writes: list[Call]) -> None:
    """A position off the border: one buffered write, although memory and length are aligned."""
    with store.create_blob("a", nbytes=NBYTES + 512) as writer:
        writer.write_at(512, memory(pattern(NBYTES)))
        writer.write_at(0, memory(bytes(512)))
        writer.finish()
    assert [(False, NBYTES), (False, 512)] == writes
    assert bytes(512) + pattern(NBYTES) == store.read("a", max_nbytes=NBYTES + 512)


@pytest.mark.parametrize(("shift", "nbytes"), [(64, NBYTES), (0, NBYTES - 1)])
def test_other_writes_are_buffered(store: LocalStore, writes: list[Call], shift: int, nbytes: int) -> None:
    """Memory or length off the border: one buffered write, the same bytes."""
    with store.create_blob("a", nbytes=nbytes) as writer:
        writer.write_at(0, memory(pattern(nbytes), shift=shift))
        writer.finish()
    assert [(False, nbytes)] == writes
    assert pattern(nbytes) == store.read("a", max_nbytes=nbytes)


def test_refused_direct_write_is_buffered(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that opens for direct I/O and then refuses the alignment gets buffered writes."""
    pwrite = os.pwrite

    def refuse_direct(descriptor: int, view: memoryview, position: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, view, position)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    with store.create_blob("a", nbytes=NBYTES) as writer:
        writer.write_at(0, memory(pattern(NBYTES)))
        writer.finish()
    assert pattern(NBYTES) == store.read("a", max_nbytes=NBYTES)


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only a part is followed by others, also from a position that is not aligned."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, position: pwrite(descriptor, view[:1000], position))
    with LocalStore(store.url, direct=False).create_blob("a", nbytes=NBYTES) as writer:
        writer.write_at(0, memory(pattern(NBYTES)))
        writer.finish()
    assert pattern(NBYTES) == store.read("a", max_nbytes=NBYTES)


def test_uncached_aligned_reads_are_direct(store: LocalStore, reads: list[Call]) -> None:
    """What is not in the page cache is read past it into aligned memory."""
    write_blob(store, "a", pattern(NBYTES))
    forget(Path(store.url) / "a")
    found = memory(bytes(NBYTES))
    with store.open_blob("a") as reader:
        reader.read_into(0, found)
    assert ([(True, NBYTES)], pattern(NBYTES)) == (reads, bytes(found))


def test_cached_reads_are_buffered(store: LocalStore, reads: list[Call]) -> None:
    """What is in the page cache is copied from there, into any memory."""
    write_blob(store, "a", pattern(NBYTES))
    store.read("a", max_nbytes=NBYTES)
    found = memory(bytes(NBYTES))
    with store.open_blob("a") as reader:
        reader.read_into(0, found)
    assert ([(False, NBYTES)], pattern(NBYTES)) == (reads, bytes(found))


def test_refused_direct_read_is_buffered(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that refuses a direct read gets buffered ones, and is not asked again."""
    write_blob(store, "a", pattern(NBYTES))
    forget(Path(store.url) / "a")
    preadv, tried = os.preadv, []

    def refuse_direct(descriptor: int, views: list[memoryview], position: int) -> int:
        tried.append(is_direct(descriptor))
        if tried[-1]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(descriptor, views, position)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    found = memory(bytes(NBYTES))
    with store.open_blob("a") as reader:
        reader.read_into(0, found)
        forget(Path(store.url) / "a")
        reader.read_into(0, found)
    assert ([True, False, False], pattern(NBYTES)) == (tried, bytes(found))


def test_direct_reads_of_a_deleted_file(store: LocalStore, reads: list[Call]) -> None:
    """Direct I/O begins on the open file, not on its name."""
    write_blob(store, "a", pattern(NBYTES, seed=1))
    forget(Path(store.url) / "a")
    found = memory(bytes(NBYTES))
    with store.open_blob("a") as reader:
        store.delete(("a",))
        write_blob(store, "a", pattern(NBYTES, seed=2))
        reader.read_into(0, found)
    assert ([(True, NBYTES)], pattern(NBYTES, seed=1)) == (reads, bytes(found))


def test_memory_filesystem_needs_no_direct_io(quick_path: Path) -> None:
    """Where there is no device below the page cache, direct I/O counts as refused."""
    if not str(quick_path).startswith("/dev/shm"):
        pytest.skip("no memory filesystem here")
    with (quick_path / "a").open("wb") as file:
        assert reopen_direct(file.fileno(), os.O_RDWR) is None


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A length and pieces that cover it in any order: begin, end, shift of the memory. Many borders lie on pages."""
    nbytes = draw(st.integers(1, 12)) * DIRECT_ALIGNMENT + draw(st.sampled_from([0, 0, 1, 777]))
    pages = st.integers(0, 12).map(lambda page: page * DIRECT_ALIGNMENT)
    borders = sorted({0, nbytes} | {cut for cut in draw(st.lists(pages | st.integers(1, 50_000), max_size=8)) if cut < nbytes})
    pieces = [(begin, end, draw(st.sampled_from([0, 0, 1, 64]))) for begin, end in itertools.pairwise(borders)]
    return nbytes, draw(st.permutations(pieces))


@settings(max_examples=40)
@given(cutting=cuttings())
def test_any_mix_of_direct_and_buffered_writes_gives_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, cutting: tuple[int, list[tuple[int, int, int]]]
) -> None:
    """However a blob is cut, in whatever order and memory its pieces are written by four threads, it holds its bytes."""
    nbytes, pieces = cutting
    data = pattern(nbytes)
    store = LocalStore(tmp_path_factory.mktemp("mix"))
    with store.create_blob("a", nbytes=nbytes) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: writer.write_at(piece[0], memory(data[piece[0] : piece[1]], shift=piece[2])), pieces))
        writer.finish()
    forget(Path(store.url) / "a")
    assert data == read_range(store, "a", 0, nbytes)
