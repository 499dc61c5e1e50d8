"""Addresses: paths of leaves in the app state, how they are written, matched by globs, shown, and turned into directories.

An address is components joined by `/`. A component is a string key (`~` as `~0`, `/` as `~1`), a list position in decimal, or
any other key as `~` and a letter: `~i1` int, `~bTrue` bool, `~n` None, `~f0.5` float, `~y00ff` bytes, `~t(~i0,a,)` tuple.
`~r<rank>` is reserved for per-rank tensors. Components never clash within one container, but they do not say what a container
was: the value codec keeps the true types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import xxhash

from anyshard.errors import InvalidAppState, UnsupportedValue

SECTION_DIRECTORY = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,63}")
_HASHED_DIRECTORY = re.compile(r".*-[0-9a-f]{8}")
MAX_SECTION_LENGTH = 1024
_STEM_LENGTH = 64 - len("-") - 8
# Within a tuple the signs that hold it together are escaped too, so that no string can imitate one.
_ESCAPES = str.maketrans({"~": "~0", "/": "~1"})
_TUPLE_ESCAPES = str.maketrans({"~": "~0", "/": "~1", ",": "~2", "(": "~3", ")": "~4"})
_GLOB_TOKEN = re.compile(r"\*{2,}|\*|\?|\[!?(?:\][^\]]*|[^\]]+)\]|.", re.DOTALL)
_SET_MEMBER = re.compile(r"(.)-(.)|(.)", re.DOTALL)


def component(key: object, *, within: str = "") -> str:
    """The address component of a dict key; keys that differ get components that differ.

    `within` is the container's address. Raises `UnsupportedValue` for a key that no address can hold: another type, a
    subclass, or a string that is not UTF-8.
    """
    return _write_key(key, within, _ESCAPES)


def _write_key(key: object, within: str, escapes: dict[int, str]) -> str:
    match key:
        case str() if type(key) is str:
            return _checked(key, within).translate(escapes)
        case tuple() if type(key) is tuple:
            return f"~t({''.join(_write_key(part, within, _TUPLE_ESCAPES) + ',' for part in key)})"
        case bytes() if type(key) is bytes:
            return f"~y{key.hex()}"
        case None:
            return "~n"
        case bool() | int() | float() if type(key) in (bool, int, float):
            return f"~{type(key).__name__[0]}{key!r}"
    raise UnsupportedValue(
        f"{show(within) or 'app state'}: expected keys of type str, int, bool, float, bytes, None or tuples of these, "
        f"found {type(key).__qualname__} {show(repr(key))}; turn the key into a string",
        address=within,
    )


def _checked(text: str, within: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        where = show(within) or "app state"
        message = f"{where}: expected a name that is valid UTF-8, found {show(text)!r}; rename it"
        raise UnsupportedValue(message, address=within) from None
    return text


def join_address(*components: str) -> str:
    """The address of components that are written already (by `component`, or list positions, or an address to go on from)."""
    return "/".join(components)


def split_address(address: str) -> tuple[str, ...]:
    """The components of an address, as written."""
    return tuple(address.split("/"))


def unescape(written: str) -> str:
    """The string key of a component that was made of one."""
    return written.replace("~1", "/").replace("~0", "~")


def section_of(address: str) -> str:
    """The section that an address lies in: its first component, unescaped."""
    return unescape(address.partition("/")[0])


def show(address: str) -> str:
    """An address for messages: control characters, and others that do not print, are escaped."""
    if address.isprintable():
        return address
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in address)


@final
class Globs:
    """Address globs, compiled once: `*` and `?` stay within a component, `**` crosses `/`, `[...]` and `[!...]` are sets."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._pattern = re.compile("|".join(f"(?:{_translate(pattern)})" for pattern in patterns) if patterns else r"(?!)")

    def match(self, address: str) -> bool:
        """Whether at least one of the globs matches the whole address."""
        return self._pattern.fullmatch(address) is not None

    def can_match_in(self, address: str) -> bool:
        """Whether a glob matches `address`, or may match something below it."""
        return any(Globs((start,)).match(address) for pattern in self._patterns for start in _list_starts(pattern))

    def match_all_below(self, address: str) -> bool:
        """Whether one glob matches everything below `address`, whatever that is."""
        starts = [pattern.rstrip("*") for pattern in self._patterns if pattern.endswith("**")]
        return any(Globs((start,)).match(below) for start in starts for below in (f"{address}/", address))


def escape(text: str) -> str:
    """A glob that matches `text` and nothing else."""
    return re.sub(r"[*?\[]", r"[\g<0>]", text)


def _list_starts(glob: str) -> Iterator[str]:
    """Globs for the addresses at and below which a glob may match: itself, and it up to each slash or `**` in it."""
    tokens = _GLOB_TOKEN.findall(glob)
    for end, token in enumerate(tokens):
        if token == "/":
            yield "".join(tokens[:end])
        elif token.startswith("**"):
            yield "".join(tokens[: end + 1])
    yield glob


def _translate(glob: str) -> str:
    return "".join(_translate_token(token) for token in _GLOB_TOKEN.findall(glob))


def _translate_token(token: str) -> str:
    if token.startswith("**"):
        return "(?s:.*)"
    if token == "*":
        return "[^/]*"
    if token == "?":
        return "[^/]"
    if token.startswith("[") and len(token) > 1:
        return _translate_set(token[1:-1])
    return re.escape(token)


def _translate_set(members: str) -> str:
    negated = len(members) > 1 and members.startswith("!")
    body = "".join(_translate_range(*found.groups()) for found in _SET_MEMBER.finditer(members, int(negated)))
    return f"(?!/)[{'^' if negated else ''}{body}]"


def _translate_range(low: str | None, high: str | None, single: str | None) -> str:
    if low is None or high is None:
        return re.escape(single or "")
    return f"{re.escape(low)}-{re.escape(high)}" if low <= high else re.escape(f"{low}-{high}")


def section_directory(section: str) -> str:
    """The directory of a section: matches `SECTION_DIRECTORY`, and differs for all sections even where case is ignored.

    A name that is safe already stays; any other becomes a readable stem and 8 hex digits of its xxh3-64.
    """
    # A name that looks hashed is hashed as well, else it could be taken for that of another section.
    if SECTION_DIRECTORY.fullmatch(section) and not section.endswith(".") and not _HASHED_DIRECTORY.fullmatch(section):
        return section
    stem = re.sub(r"[^a-z0-9_.-]", "_", section.lower())[:_STEM_LENGTH]
    digest = xxhash.xxh3_64_hexdigest(_checked(section, section).encode())[:8]
    return f"{re.sub(r'^[.-]', '_', stem) or '_'}-{digest}"


def check_directories(sections: Iterable[str]) -> None:
    """Raise `InvalidAppState` if a section's name is too long, or two would share a directory (a collision of 32-bit hashes)."""
    owners: dict[str, str] = {}
    for section in sections:
        if len(section) > MAX_SECTION_LENGTH:
            raise InvalidAppState(
                f"expected top-level names of at most {MAX_SECTION_LENGTH} characters, found one of {len(section)}: "
                f"{show(section[:40])}...; shorten it"
            )
        other = owners.setdefault(section_directory(section), section)
        if other != section:
            raise InvalidAppState(f"sections {show(other)!r} and {show(section)!r} would share a directory; rename one of them")
