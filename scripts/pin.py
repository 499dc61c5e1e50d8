"""Write constraints.txt from what is installed in the running environment.

Only anyshard, its extras and what they need are pinned, without local parts (`2.13.0+cpu` is pinned as `2.13.0`).

    .venv/bin/python scripts/pin.py
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("torch", "demo", "object-store", "fsspec", "dev")
HEADER = "# Exact versions of everything that `make` installs; change them on purpose. Written by scripts/pin.py.\n"


def find_needed(name: str, extras: tuple[str, ...], found: dict[str, str]) -> None:
    """Add the installed versions of all that `name` needs, by canonical name, to `found`."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        key = canonicalize_name(requirement.name)
        if not wanted or key in found:
            continue
        found[key] = importlib.metadata.version(key).partition("+")[0]
        find_needed(key, tuple(requirement.extras), found)


def main() -> int:
    """Write the file and say how many pins it has."""
    found = {"pip": importlib.metadata.version("pip")}
    find_needed("anyshard", EXTRAS, found)
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
    Path(__file__).parents[1].joinpath("constraints.txt").write_text(HEADER + "".join(lines), encoding="ascii")
    print(f"{len(lines)} pins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
