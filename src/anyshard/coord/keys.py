"""Where things lie in the key-value store: `anyshard/<group>/<incarnation>/<sequence>/...`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Keys of one group, which its ranks find without having agreed on anything: their list is enough."""

    space: str

    def hello(self, rank: int) -> str:
        """What a rank says when it comes: a nonce of this process."""
        return f"{self.space}/hello.{rank}"

    def welcome(self, rank: int) -> str:
        """The coordinator's answer to a hello, with the incarnation."""
        return f"{self.space}/welcome.{rank}"

    def accepted(self, rank: int) -> str:
        """A rank's word that it has read the welcome."""
        return f"{self.space}/accepted.{rank}"

    def channel(self, name: str) -> str:
        """What the keys of a channel begin with."""
        return f"{self.space}/channel/{name}"

    def of_operation(self, incarnation: str, sequence: int) -> OperationKeys:
        """Keys of one operation."""
        return OperationKeys(f"{self.space}/{incarnation}", sequence)


@dataclass(frozen=True, slots=True)
class OperationKeys:
    """Keys of one operation, and of the number of the newest one."""

    incarnation: str
    sequence: int

    @property
    def newest(self) -> str:
        """Number of the newest operation that the coordinator has begun."""
        return f"{self.incarnation}/newest"

    @property
    def begin(self) -> str:
        """The coordinator's word that the operation has begun: its id and what it is about."""
        return f"{self.incarnation}/{self.sequence}/begin"

    @property
    def decision(self) -> str:
        """The one record that decides."""
        return f"{self.incarnation}/{self.sequence}/decision"

    @property
    def waiting(self) -> str:
        """Whom the coordinator waits for."""
        return f"{self.incarnation}/{self.sequence}/waiting"

    def post(self, phase: str, rank: int) -> str:
        """What a rank says to the coordinator."""
        return f"{self.incarnation}/{self.sequence}/post.{phase}.{rank}"

    def announcement(self, phase: str) -> str:
        """What the coordinator says to all."""
        return f"{self.incarnation}/{self.sequence}/announcement.{phase}"

    def share(self, phase: str, rank: int) -> str:
        """What the coordinator says to one rank."""
        return f"{self.incarnation}/{self.sequence}/share.{phase}.{rank}"

    def told(self, rank: int) -> str:
        """A rank's latest word on its progress."""
        return f"{self.incarnation}/{self.sequence}/told.{rank}"

    def heard(self, rank: int) -> str:
        """A rank's word that it knows how the operation has ended."""
        return f"{self.incarnation}/{self.sequence}/heard.{rank}"

    def claim(self, digest: str) -> str:
        """The word of the rank that stores the bytes of this digest for all."""
        return f"{self.incarnation}/{self.sequence}/claim.{digest}"

    def content(self, digest: str) -> str:
        """The bytes of this digest."""
        return f"{self.incarnation}/{self.sequence}/content.{digest}"


def keys_of_group(ranks: Sequence[int]) -> GroupKeys:
    """The same keys on every rank of a group, others for any other list of ranks."""
    digest = hashlib.blake2b(",".join(map(str, ranks)).encode("ascii"), digest_size=8)
    return GroupKeys(f"anyshard/{digest.hexdigest()}")
