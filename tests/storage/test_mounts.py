"""Filesystems by their names in the kernel's table, names that are seen late, and stores on filesystems that lack things."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import anyshard
from anyshard.errors import BlobNotFound, StorageFull
from anyshard.monitor.events import SILENT
from anyshard.storage import local
from anyshard.storage.local import LocalStore
from anyshard.storage.posix import visibility
from anyshard.storage.posix.mounts import Mount, MountKind, find_mount
from anyshard.storage.posix.site import Site
from anyshard.storage.posix.visibility import Visibility
from anyshard.testing.store_contract import MakeStore, StoreContract
from anyshard.testing.store_fixtures import keys_below, read_range, write_blob

from .lies import Lie, fail, tell

# NFS has neither of these, and its clients hear late of other hosts' names.
NFS_LIKE = (Lie.NO_DIRECT, Lie.NO_RENAME, Lie.NO_FALLOCATE, Lie.NO_DIRECTORY_SYNC, Lie.LATE_NAMES)
SOON_S = 0.02


# The table of mounts ---------------------------------------------------------------------------------------------------


def line(point: str, filesystem: str, device: str = "0:99", *, root: str = "/") -> str:
    """A line of mountinfo as proc(5) has it, with two optional fields."""
    return f"36 35 {device} {root} {point} rw,noatime shared:1 master:2 - {filesystem} server:/x rw,vers=4.2\n"


def found(tmp_path: Path, path: Path, *lines: str) -> Mount:
    """What is found at `path` if this is the table."""
    (tmp_path / "mountinfo").write_text("".join(lines))
    return find_mount(str(path), table=str(tmp_path / "mountinfo"))


def test_the_deepest_mount_above_a_path_counts(tmp_path: Path) -> None:
    """Of nested mounts the one nearest to the path; a name that only begins alike is none of them."""
    inner = tmp_path / "data" / "inner"
    inner.mkdir(parents=True)
    table = (
        line("/", "ext4"),
        line(str(inner), "lustre"),
        line(str(tmp_path / "data"), "nfs4"),
        line(str(tmp_path / "da"), "ceph"),
        line(str(tmp_path / "data" / "inn"), "ceph"),
    )
    paths = (tmp_path / "data", inner / "a" / "b", tmp_path / "data" / "innermost", tmp_path / "database")
    assert ["nfs4", "lustre", "nfs4", "ext4"] == [found(tmp_path, path, *table).filesystem for path in paths]


def test_a_bind_mount_is_of_the_filesystem_that_it_shows(tmp_path: Path) -> None:
    """Its own line names that, whatever it is mounted on."""
    table = line("/", "ext4"), line(str(tmp_path), "nfs4", root="/export/deep/inside")
    assert "nfs4" == found(tmp_path, tmp_path / "a", *table).filesystem


def test_escapes_of_a_mount_point_are_undone(tmp_path: Path) -> None:
    """The kernel writes blanks, tabs, line ends and backslashes as octal numbers."""
    (place := tmp_path / "a b\tc\\d").mkdir()
    escaped = str(place).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    assert "cifs" == found(tmp_path, place, line("/", "ext4"), line(escaped, "cifs")).filesystem


def test_of_two_mounts_at_one_point_the_later_counts(tmp_path: Path) -> None:
    """It lies on top of the other."""
    assert "xfs" == found(tmp_path, tmp_path, line(str(tmp_path), "nfs4"), line(str(tmp_path), "xfs")).filesystem


def test_a_mount_that_another_hides_does_not_count(tmp_path: Path) -> None:
    """What is deeper in the table but not at the path, for something was mounted over it later, has another device."""
    (deep := tmp_path / "deep").mkdir()
    status = os.stat(deep).st_dev
    device = f"{os.major(status)}:{os.minor(status)}"
    assert "xfs" == found(tmp_path, deep, line(str(deep), "nfs4"), line(str(tmp_path), "xfs", device)).filesystem


def test_links_to_a_mount_are_followed(tmp_path: Path) -> None:
    """A path is where it leads to, also one that is not there yet."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mount")
    table = line("/", "ext4"), line(str(tmp_path / "mount"), "beegfs")
    assert "beegfs" == found(tmp_path, tmp_path / "link" / "run" / "step_1", *table).filesystem


@pytest.mark.parametrize("text", ["", "no table\n", "36 35 x:y / / rw - ext4 a rw\n", "1 2 0:1 / / rw\n", "\n\n"])
def test_a_table_that_says_nothing(tmp_path: Path, text: str) -> None:
    """Without one, or with one of another form, the filesystem is unknown and nothing is taken for granted."""
    for mount in (found(tmp_path, tmp_path, text), find_mount(str(tmp_path), table=str(tmp_path / "none"))):
        assert (Mount(""), MountKind.UNKNOWN, None, 10) == (mount, mount.kind, mount.guarded, mount.visibility_timeout_s)


def test_the_real_table_knows_memory() -> None:
    """What this machine says of a directory in memory."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert ("tmpfs", MountKind.LOCAL) == ((mount := find_mount("/dev/shm/none/below")).filesystem, mount.kind)


@pytest.mark.parametrize(
    ("filesystem", "kind", "guarded", "timeout_s"),
    [
        ("ext4", MountKind.LOCAL, True, 0),
        ("xfs", MountKind.LOCAL, True, 0),
        ("overlay", MountKind.LOCAL, True, 0),
        ("fuseblk", MountKind.LOCAL, True, 0),
        ("nfs", MountKind.NETWORK, True, 90),
        ("nfs4", MountKind.NETWORK, True, 90),
        ("lustre", MountKind.NETWORK, True, 10),
        ("gpfs", MountKind.NETWORK, True, 10),
        ("cifs", MountKind.NETWORK, None, 10),
        ("9p", MountKind.NETWORK, None, 10),
        ("fuse", MountKind.FUSE, None, 10),
        ("fuse.sshfs", MountKind.FUSE, None, 10),
        ("fuse.juicefs", MountKind.FUSE, True, 10),
        ("fuse.seaweedfs", MountKind.FUSE, False, 10),
        ("somethingnew", MountKind.UNKNOWN, None, 10),
    ],
)
def test_what_is_known_of_filesystems(filesystem: str, kind: MountKind, guarded: bool | None, timeout_s: float) -> None:
    """Kind, whether creation is exclusive between hosts, how late names are seen."""
    mount = Mount(filesystem)
    assert (kind, guarded, timeout_s) == (mount.kind, mount.guarded, mount.visibility_timeout_s)


def mounted_as(filesystem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all local stores to come be on such a filesystem."""
    monkeypatch.setattr(local, "find_mount", lambda _path: Mount(filesystem))


def test_a_store_says_what_its_filesystem_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capabilities of one object stay, even if something else is mounted there meanwhile."""
    mounted_as("fuse.unknown", monkeypatch)
    store = LocalStore(tmp_path)
    assert store.capabilities.guarded is None
    mounted_as("ext4", monkeypatch)
    assert [None, True] == [store.capabilities.guarded, LocalStore(tmp_path).capabilities.guarded]


def test_free_space_by_a_program_is_not_believed(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FUSE program that knows of 512 free bytes, as a new SeaweedFS does, takes more; a kernel's filesystem is believed."""
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: os.statvfs_result((512, 512, 1, 1, 1, 9, 9, 9, 0, 255)))
    with pytest.raises(StorageFull):
        write_blob(LocalStore(quick_path), "a", bytes(1000))
    mounted_as("fuse.seaweedfs", monkeypatch)
    store = LocalStore(quick_path)
    write_blob(store, "a", bytes(1000))
    assert (None, ("a",)) == (store.free_nbytes(), keys_below(store, ""))


# Names that are seen late ----------------------------------------------------------------------------------------------


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(visibility, "time", clock)
    return clock


def appearing(clock: FakeTime, after_s: float, content: str = "found") -> Callable[[], str]:
    """An attempt that finds the file once so much time has passed."""
    begin_s = clock.now_s

    def attempt() -> str:
        return content if clock.now_s >= begin_s + after_s else str(fail(errno.ENOENT))

    return attempt


def find(seen: Visibility, attempt: Callable[[], str], root: Path) -> str:
    return seen.find(attempt, Site(str(root), "data/a", SILENT), ["data"])


def test_a_late_name_is_waited_for(clock: FakeTime, tmp_path: Path) -> None:
    """With pauses that grow, and no longer than it takes."""
    assert "found" == find(Visibility(10), appearing(clock, 3), tmp_path)
    assert (True, True) == (clock.sleeps == sorted(clock.sleeps), 3 <= clock.now_s - 100 <= 4)


def test_an_absent_name_ends_after_the_timeout(clock: FakeTime, tmp_path: Path) -> None:
    """The error names the file, how long names are waited for, and what to look at."""
    with pytest.raises(BlobNotFound, match=r"data/a: found nothing there.* up to 10 s.*same on all hosts") as caught:
        find(Visibility(10), appearing(clock, 99), tmp_path)
    assert (110, "data/a", errno.ENOENT) == (clock.now_s, caught.value.file, caught.value.errno)


def test_many_absent_names_share_one_wait(clock: FakeTime, tmp_path: Path) -> None:
    """A checkpoint that lacks a thousand files is waited for once; each of them is looked for twice."""
    seen, attempts = Visibility(10), []

    def attempt() -> str:
        attempts.append(clock.now_s)
        return str(fail(errno.ENOENT))

    for _ in range(1000):
        with pytest.raises(BlobNotFound):
            find(seen, attempt, tmp_path)
    assert (110, 2) == (clock.now_s, sum(at_s == 110 for at_s in attempts[-2:]))


def test_a_later_name_is_waited_for_again(clock: FakeTime, tmp_path: Path) -> None:
    """What was missing long ago says nothing any more."""
    seen = Visibility(10)
    with pytest.raises(BlobNotFound):
        find(seen, appearing(clock, 99), tmp_path)
    clock.now_s += 11
    assert "found" == find(seen, appearing(clock, 5), tmp_path)


def test_local_names_are_not_waited_for(clock: FakeTime, tmp_path: Path) -> None:
    """On a local filesystem what is absent is absent."""
    with pytest.raises(BlobNotFound):
        LocalStore(tmp_path).open_blob("a")
    assert [] == clock.sleeps


@pytest.mark.parametrize(("filesystem", "timeout_s"), [("nfs4", 90), ("fuse.sshfs", 10), ("lustre", 10)])
def test_how_long_a_store_waits(
    clock: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str, timeout_s: float
) -> None:
    """By its filesystem, or as it was told."""
    mounted_as(filesystem, monkeypatch)
    for store, expected_s in ((LocalStore(tmp_path), timeout_s), (LocalStore(tmp_path, visibility_timeout_s=1.5), 1.5)):
        before_s = clock.now_s
        with pytest.raises(BlobNotFound):
            store.open_blob("a")
        assert expected_s == clock.now_s - before_s


def test_records_that_may_not_exist_are_not_waited_for(clock: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits ask for the next generation only to find that there is none: `read`, `list` and `delete` answer at once."""
    mounted_as("nfs4", monkeypatch)
    store = LocalStore(tmp_path)
    with pytest.raises(BlobNotFound):
        store.read("manifest-2.json", max_nbytes=9)
    store.delete(["manifest-2.json"])
    assert ((), []) == (store.list("none/").entries, clock.sleeps)


def test_a_directory_that_is_seen_late(clock: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories above a blob may be new to this host as well."""
    mounted_as("nfs4", monkeypatch)
    monkeypatch.setattr(clock, "sleep", lambda _s: write_blob(LocalStore(tmp_path), "data/model/a", b"content"))
    assert b"content" == read_range(LocalStore(tmp_path), "data/model/a", 0, 7)


def test_a_root_that_is_seen_late(clock: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes its first blob waits until its host sees the directory that the coordinator has made."""
    mounted_as("nfs4", monkeypatch)
    monkeypatch.setattr(clock, "sleep", lambda _s: LocalStore(tmp_path / "run" / "step_1").prepare(["data/"]))
    write_blob(store := LocalStore(tmp_path / "run" / "step_1"), "data/model/a", b"content")
    assert b"content" == store.read("data/model/a", max_nbytes=7)


def test_a_root_that_is_never_seen(clock: FakeTime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made by whoever comes: then each host would write to a directory of its own."""
    mounted_as("nfs4", monkeypatch)
    with pytest.raises(BlobNotFound, match="same on all hosts"):
        write_blob(LocalStore(tmp_path / "step_1"), "data/a", b"")
    assert ([], 190) == (list(tmp_path.iterdir()), clock.now_s)


@pytest.mark.parametrize("verb", ["read", "open_blob"])
def test_a_stale_directory_is_opened_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """ESTALE on the way to a file is an old client's: the second walk finds it, a second ESTALE is an error."""
    write_blob(LocalStore(tmp_path), "data/a", b"content")
    opened, refused = os.open, iter([True])

    def stale(path: str, flags: int, *args: int, **options: int) -> int:
        if path == "a" and next(refused, False):
            fail(errno.ESTALE)
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", stale)
    reads = {"read": lambda: LocalStore(tmp_path).read("data/a", max_nbytes=7)}
    assert b"content" == reads.get(verb, lambda: read_range(LocalStore(tmp_path), "data/a", 0, 7))()
    refused = iter([True, True])
    with pytest.raises(anyshard.StorageError, match="file server replaced or removed"):
        LocalStore(tmp_path).open_blob("data/a")


# Filesystems that lack things ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lies",
    [*((lie,) for lie in Lie), tuple(Lie), NFS_LIKE],
    ids=[*(lie.name.lower() for lie in Lie), "all", "nfs_like"],
)
class TestLies(StoreContract):
    """The contract holds on filesystems that lack one thing, all of them, or what NFS lacks."""

    @pytest.fixture
    def make_store(self, quick_path: Path, lies: tuple[Lie, ...], monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        tell(lies, monkeypatch)
        numbers = itertools.count()
        return lambda: LocalStore(quick_path / f"step_{next(numbers)}", visibility_timeout_s=SOON_S)


@pytest.mark.parametrize("filesystem", ["nfs4", "fuse.sshfs"], ids=["guarded", "unknown"])
@pytest.mark.parametrize("lies", [tuple(Lie), NFS_LIKE], ids=["all", "nfs_like"])
def test_a_checkpoint_on_a_filesystem_that_lacks_things(
    tmp_path: Path, lies: tuple[Lie, ...], filesystem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved, loaded, saved over and cleaned; sections that differ in case only have directories that do not."""
    tell(lies, monkeypatch)
    mounted_as(filesystem, monkeypatch)
    for number in (1.0, 2.0):
        state = {"Model": {"w": torch.full((300, 7), number)}, "model": {"w": torch.full((5,), -number)}}
        anyshard.save(tmp_path / "a", state, overwrite=True)
        live = {"Model": {"w": torch.zeros(300, 7)}, "model": {"w": torch.zeros(5)}}
        anyshard.load(tmp_path / "a", live)
        assert [number, -number] == [float(part["w"].mean()) for part in live.values()]
    anyshard.ops.clean(tmp_path / "a", grace_s=0)
    assert 2 == len([key for key in keys_below(LocalStore(tmp_path / "a"), "") if "manifest" in key or "index" in key])
