"""Keys and prefixes: which names a store takes, the same on every backend."""

from __future__ import annotations

from anyshard.errors import InvalidPath

_REFUSED_COMPONENTS = frozenset({"", ".", ".."})
_REFUSED_CHARACTERS = frozenset({"\0", "\\"})  # a backslash is a separator on some backends and a letter on others


def split_key(key: str) -> tuple[str, ...]:
    """The components of a key; what could leave the root, or mean something else on another backend, is `InvalidPath`."""
    components = tuple(key.split("/"))
    if not _REFUSED_COMPONENTS.isdisjoint(components) or not _REFUSED_CHARACTERS.isdisjoint(key) or not _is_utf8(key):
        raise InvalidPath(
            f"{key!r} is no key: expected components joined by '/', none of them empty, '.' or '..', in UTF-8 without NUL and "
            "backslash. Keys are made by anyshard or come from a manifest: do not use a checkpoint whose manifest names this file"
        )
    return components


def split_prefix(prefix: str) -> tuple[str, ...]:
    """The components of a prefix, which is empty or ends in `/`."""
    if prefix == "":
        return ()
    if not prefix.endswith("/"):
        raise InvalidPath(f"{prefix!r} is no prefix: expected '' or a key followed by '/'")
    return split_key(prefix[:-1])


def is_key(name: str) -> bool:
    """Whether a name found in a listing can be used as a key."""
    try:
        split_key(name)
    except InvalidPath:
        return False
    return True


def check_token(token: str) -> str:
    """The token itself if it is made of ASCII letters and digits, as temporary names need it."""
    if not (token.isascii() and token.isalnum()):
        raise InvalidPath(f"{token!r} is no token: expected ASCII letters and digits")
    return token


def _is_utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
