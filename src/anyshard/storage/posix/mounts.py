"""What filesystem a path is on, by the kernel's table of mounts, and what can be expected of it.

A probe cannot find out whether two hosts may both create a name: the kernel of one host keeps its own calls apart, whatever its
filesystem does (two FUSE mounts of one SeaweedFS let both win in most rounds of a race by renameat2, link and O_EXCL alike, one
mount never did). So this goes by what is known of filesystems by name.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from anyshard.storage.posix.site import nearest_existing

MOUNT_TABLE: Final = "/proc/self/mountinfo"

_LOCAL_TIMEOUT_S = 0.0
_REMOTE_TIMEOUT_S = 10.0
_NFS_TIMEOUT_S = 90.0  # a client may keep the absence of a name for 60 s (acdirmax)


class MountKind(enum.StrEnum):
    """Whose names a filesystem shows: this kernel's own, a server's through the kernel, a program's, or nobody knows."""

    LOCAL = "local"
    NETWORK = "network"
    FUSE = "fuse"
    UNKNOWN = "unknown"


# One kernel makes all names: it holds the lock of the directory while it looks for a name and makes it.
_LOCAL = re.compile(
    r"ext[234]|xfs|btrfs|zfs|bcachefs|f2fs|nilfs2|jfs|reiserfs|tmpfs|ramfs|overlay|aufs|squashfs|erofs|iso9660|vfat|exfat|msdos|"
    r"ntfs3?|hfsplus|fuseblk|ecryptfs"
)
_NETWORK = re.compile(
    r"nfs4?|lustre|gpfs|beegfs|ceph|gfs2|ocfs2|cifs|smb3|smbfs|9p|virtiofs|afs|coda|panfs|pvfs2|orangefs|wekafs|glusterfs"
)
_FUSE = re.compile(r"fuse|fuse\..*")
# One server, or locks between servers, decide on O_EXCL and link(2); why, for each.
_GUARDED = MappingProxyType(
    {
        "nfs": "exclusive create and link of version 3 are atomic on the server; the client refuses RENAME_NOREPLACE",
        "nfs4": "exclusive create and link of version 4 are atomic on the server; the client refuses RENAME_NOREPLACE",
        "lustre": "the metadata server holds the lock of the directory",
        "gpfs": "one node at a time holds the token of the directory",
        "beegfs": "the metadata server that owns the directory makes its names",
        "ceph": "the metadata server that owns the directory makes its names",
        "fuse.ceph": "as ceph",
        "fuse.ceph-fuse": "as ceph",
        "fuse.glusterfs": "the servers lock the name while they make it",
        "fuse.juicefs": "a transaction of its database makes a name",
        "gfs2": "the hosts share the lock of the directory",
        "ocfs2": "the hosts share the lock of the directory",
    }
)
# Programs that look for a name and then make it, or that find out at the end of the upload.
_UNGUARDED = MappingProxyType(
    {
        "fuse.seaweedfs": "measured: of 40 rounds between two mounts, two winners in 15 (renameat2), 24 (link), 30 (O_EXCL)",
        "fuse.rclone": "writes are uploaded after the file was closed, and replace",
        "fuse.s3fs": "writes are uploaded when the file is closed, and replace",
        "fuse.goofys": "writes are uploaded when the file is closed, and replace",
        "fuse.mountpoint-s3": "writes are uploaded when the file is closed, and replace",
        "fuse.blobfuse": "writes are uploaded when the file is closed, and replace",
        "fuse.blobfuse2": "writes are uploaded when the file is closed, and replace",
    }
)


@dataclass(frozen=True, slots=True)
class Mount:
    """A filesystem by the name that the kernel has for its type; "" if that could not be found out."""

    filesystem: str

    @property
    def kind(self) -> MountKind:
        """Whose names it shows."""
        kinds = ((MountKind.LOCAL, _LOCAL), (MountKind.NETWORK, _NETWORK), (MountKind.FUSE, _FUSE))
        return next((kind for kind, names in kinds if names.fullmatch(self.filesystem)), MountKind.UNKNOWN)

    @property
    def guarded(self) -> bool | None:
        """Whether of all hosts only one can create a name; None if nobody knows."""
        if self.filesystem in _UNGUARDED:
            return False
        return True if self.kind is MountKind.LOCAL or self.filesystem in _GUARDED else None

    @property
    def visibility_timeout_s(self) -> float:
        """How long a name that another host has made may stay hidden from this one."""
        if self.kind is MountKind.LOCAL:
            return _LOCAL_TIMEOUT_S
        return _NFS_TIMEOUT_S if self.filesystem in ("nfs", "nfs4") else _REMOTE_TIMEOUT_S

    @property
    def tells_free_space(self) -> bool:
        """Whether its answer to statfs can be trusted: a new SeaweedFS that grows on demand says that 512 bytes are free."""
        return self.kind is not MountKind.FUSE


def find_mount(path: str, *, table: str = MOUNT_TABLE) -> Mount:
    """The filesystem that `path` is or will be on; links are followed. Never raises an error of the operating system."""
    try:
        real = os.path.realpath(nearest_existing(path))
        device = os.stat(real).st_dev  # first, for it makes an automounter mount what is there
        with open(table, "rb") as file:
            mounts = [_read_mount(line) for line in file if line.strip()]
    except (OSError, ValueError, IndexError):
        return Mount("")
    above = [mount for mount in mounts if _is_below(real, mount.point)]
    # A mount that hides others is not always the longest one: the number of the device tells them apart, where it is in the
    # table (that of a btrfs subvolume is not). Of two at one point the later one is on top.
    above = [mount for mount in above if mount.device == device] or above
    return Mount(max(reversed(above), key=lambda mount: len(mount.point)).filesystem) if above else Mount("")


@dataclass(frozen=True, slots=True)
class _Line:
    point: str
    device: int
    filesystem: str


def _read_mount(line: bytes) -> _Line:
    """One line: `36 35 98:0 /root /point options [optional fields ...] - type source options`."""
    fields = line.split(b" ")
    major, minor = fields[2].split(b":")
    point = re.sub(rb"\\([0-7]{3})", lambda escaped: bytes([int(escaped[1], 8) & 0xFF]), fields[4])
    kind = fields[fields.index(b"-", 6) + 1]
    return _Line(os.fsdecode(point), os.makedev(int(major), int(minor)), kind.strip().decode("ascii", "replace"))


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")
