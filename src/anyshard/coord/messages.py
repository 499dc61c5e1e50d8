"""Messages of any length as values of limited length. The first piece is written last: who finds it, finds all."""

from __future__ import annotations

from anyshard.coord.protocol import MAX_VALUE_NBYTES, KeyValueStore

_HEAD = 4  # bytes that say how many further pieces there are
_PIECE_NBYTES = MAX_VALUE_NBYTES - _HEAD


def write_message(store: KeyValueStore, key: str, payload: bytes) -> tuple[str, ...]:
    """Store `payload` under `key`; the keys that it took, `key` first."""
    pieces = [payload[first : first + _PIECE_NBYTES] for first in range(0, len(payload), _PIECE_NBYTES)] or [b""]
    rest = {f"{key}.{number}": piece for number, piece in enumerate(pieces[1:])}
    for name, piece in rest.items():
        store.set(name, piece)
    store.set(key, len(rest).to_bytes(_HEAD, "big") + pieces[0])
    return (key, *rest)


def read_message(store: KeyValueStore, key: str, first: bytes) -> bytes | None:
    """The whole message whose first piece was found under `key`; None if it was deleted while it was read."""
    num_rest = int.from_bytes(first[:_HEAD], "big")
    pieces = [first[_HEAD:]]
    for number in range(num_rest):
        piece = store.get(f"{key}.{number}")
        if piece is None:
            return None
        pieces.append(piece)
    return b"".join(pieces)
