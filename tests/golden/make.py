"""Writes the golden checkpoints of the current format version into `tests/golden/v1`; never run again over existing ones.

python -m tests.golden.make
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyshard
from anyshard.commit.publish_parts import Publication, publish_parts
from anyshard.commit.thinning import thin_step
from anyshard.storage.local import LocalStore
from anyshard.testing.world import World
from tests.golden import two_ranks
from tests.golden.contents import ROLES, make_role, make_state
from tests.golden.cut import save_cut

HERE = Path(__file__).parent / "v1"


def main() -> None:
    """Write those that are not there yet."""
    for name, make in GOLDENS.items():
        if not (HERE / name).exists():
            make(HERE / name)
            sys.stdout.write(f"wrote {name}\n")


def _plain(path: Path) -> None:
    anyshard.save(path, make_state(), step=7, options=anyshard.SaveOptions(user={"loss": 0.5, "note": "golden"}))


def _two_blobs(path: Path) -> None:
    anyshard.save(path, make_state(), step=7, options=anyshard.SaveOptions(max_blob_nbytes=64 * 1024))


def _overwritten(path: Path) -> None:
    anyshard.save(path, make_state(seed=1), step=7)
    anyshard.save(path, make_state(), step=8, overwrite=True)


def _deleted(path: Path) -> None:
    anyshard.save(path, {"step": 1}, step=7)
    anyshard.ops.delete(path)


def _two_ranks(path: Path) -> None:
    with World(2) as world:
        world.run(two_ranks.save, str(path))


def _thinned(path: Path) -> None:
    anyshard.save(path, make_state(), step=7)
    thin_step(LocalStore(str(path)), ("tensors", "step"))


def _parts(path: Path) -> None:
    store = LocalStore(str(path))
    for role, seed in ROLES.items():
        anyshard.save(path / "parts" / role, make_role(seed), step=7)
    publish_parts(store, Publication(7, dict.fromkeys(ROLES), user={"metrics": {"reward": 0.5}}))


GOLDENS = {
    "plain": _plain,
    "two_blobs": _two_blobs,
    "overwritten": _overwritten,
    "deleted": _deleted,
    "cut": save_cut,
    "two_ranks": _two_ranks,
    "thinned": _thinned,
    "parts": _parts,
}

if __name__ == "__main__":
    main()
