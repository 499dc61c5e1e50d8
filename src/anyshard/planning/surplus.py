"""Surplus: what the checkpoint has and a rank does not take, told so shortly that thousands of ranks can tell it.

Ranks number the addresses of the index alike, so of most of them one bit is told. The few others travel as text.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from anyshard.records.addresses import section_of
from anyshard.records.rank_messages import Message, read_message

_LEVEL = 1  # bits of layers that are alike are short at any level


class _Surplus(Message, frozen=True):
    """The bits of numbered addresses and the text of others; some of both are extra state of modules."""

    bits: bytes
    others: tuple[str, ...]
    extra_state: tuple[str, ...]


def number_addresses(addresses: Sequence[str]) -> dict[str, int]:
    """A number for each address of a tensor, and for what holds it directly, such as the state of a parameter, by address."""
    holders = {address.rpartition("/")[0] for address in addresses}
    return {address: number for number, address in enumerate(sorted(holders.union(addresses)))}


def encode_surplus(addresses: Iterable[str], extra_state: Sequence[str], numbers: Mapping[str, int]) -> bytes:
    """What one rank does not take, as bytes; `extra_state` is surplus too."""
    bits = np.zeros(len(numbers), dtype=np.bool_)
    others = []
    for address in (*addresses, *extra_state):
        if address in numbers:
            bits[numbers[address]] = True
        else:
            others.append(address)
    surplus = _Surplus(np.packbits(bits).tobytes(), tuple(others), tuple(extra_state))
    return zlib.compress(surplus.encode(), _LEVEL)


def list_surplus(data: bytes, numbers: Mapping[str, int]) -> tuple[str, ...]:
    """The addresses that were encoded, sorted."""
    surplus = _decode(data)
    return tuple(sorted([*_pick(_unpack(surplus, numbers), numbers), *surplus.others]))


def find_common(
    told: Iterable[tuple[Sequence[str], bytes]], numbers: Mapping[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The addresses that none of the ranks takes that asked for their section, extra state apart, each sorted.

    `told` has for each rank the sections that it asked for, without which it has no say, and its surplus.
    """
    section = np.array([section_of(address) for address in numbers], dtype=np.str_)
    is_common, is_asked = np.ones(len(numbers), dtype=np.bool_), np.zeros(len(numbers), dtype=np.bool_)
    others: dict[str, set[str]] = {}
    extra_state: set[str] = set()
    for sections, data in told:
        surplus = _decode(data)
        has_say = np.isin(section, sections)
        is_common &= _unpack(surplus, numbers) | ~has_say
        is_asked |= has_say
        for name in sections:
            own = {address for address in surplus.others if section_of(address) == name}
            others[name] = others.get(name, own) & own
        extra_state.update(surplus.extra_state)
    common = set(_pick(is_common & is_asked, numbers)).union(*others.values())
    return tuple(sorted(common - extra_state)), tuple(sorted(common & extra_state))


def _decode(data: bytes) -> _Surplus:
    return read_message(zlib.decompress(data), _Surplus)


def _unpack(surplus: _Surplus, numbers: Mapping[str, int]) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(surplus.bits, dtype=np.uint8), count=len(numbers)).astype(np.bool_)


def _pick(is_chosen: NDArray[np.bool_], numbers: Mapping[str, int]) -> Iterable[str]:
    return (address for address, number in numbers.items() if is_chosen[number])
