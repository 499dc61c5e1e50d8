"""`anyshard.open`: reading tensors and values without a job."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import anyshard
from anyshard.monitor.sinks import RecordingSink
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, do_before

BIG = torch.arange(600 * 512, dtype=torch.int32).reshape(600, 512)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "step_5"
    state = {
        "model": {"big": BIG, "half": torch.ones(3, dtype=torch.bfloat16), "zero": torch.zeros(0, 3)},
        "extra": {"lr": [0.1, 0.2]},
    }
    anyshard.save(path, state, options=anyshard.SaveOptions(user={"loss": 2.5}))
    return path


KEYS: list[Any] = [
    slice(None),
    3,
    -1,
    (slice(10, 20), slice(None, None, 7)),
    (slice(None, None, -3), 5),
    (Ellipsis, 511),
    (slice(5, 5),),
    (slice(590, 700), slice(-4, None)),
    np.int64(7),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_is_numpys(place: Path, key: Any) -> None:
    """Integers, slices and an ellipsis pick what NumPy would pick."""
    expected, found = BIG.numpy()[key], anyshard.open(place)["model/big"][key]
    assert (expected.shape, expected.tolist()) == (found.shape, found.tolist())


def test_numpy_takes_a_stored_tensor(place: Path) -> None:
    """`np.asarray` reads all of it, also as another dtype; sharing its memory is refused."""
    tensor = anyshard.open(place)["model/big"]
    assert np.array_equal(BIG.numpy(), np.asarray(tensor))
    assert np.float64 == np.asarray(tensor, dtype=np.float64).dtype
    with pytest.raises(ValueError, match="no array to share"):
        np.asarray(tensor, copy=False)


@pytest.mark.parametrize("key", [600, (0, 0, 0), "a", 1.5, True, (..., ...)], ids=str)
def test_wrong_index_is_an_index_error(place: Path, key: Any) -> None:
    """What NumPy's basic indexing does not know is IndexError."""
    with pytest.raises(IndexError):
        anyshard.open(place)["model/big"][key]


def test_rows_read_only_their_cells(place: Path) -> None:
    """Sixteen rows cost two cells of data, not the tensor."""
    store = CountingStore(LocalStore(str(place)))
    tensor = anyshard.open(store)["model/big"]
    tensor[0:1]
    before = store.count(Verb.READ_INTO).nbytes
    tensor[300:316]
    assert store.count(Verb.READ_INTO).nbytes - before <= 2 * 256 * 1024


def test_records_of_a_checkpoint(place: Path) -> None:
    """Step, sections, user metadata, addresses, shapes and values are there without reading tensors."""
    with anyshard.open(place) as checkpoint:
        assert (5, ("model", "extra"), {"loss": 2.5}) == (checkpoint.step, checkpoint.sections, dict(checkpoint.user))
        assert ("model/big", "model/half", "model/zero") == checkpoint.addresses()
        assert ((600, 512), "int32") == (checkpoint["model/big"].shape, checkpoint["model/big"].dtype)
        assert [0.1, 0.2] == checkpoint["extra/lr"]
        assert 0.2 == checkpoint["extra/lr/1"]
        assert (0, 3) == checkpoint["model/zero"].numpy().shape
        assert [1.0] * 3 == checkpoint["model/half"].numpy().astype(float).tolist()


@pytest.mark.parametrize("address", ["model/none", "none", "extra/lr/2", "extra/lr/x", "model/big/0", ""])
def test_unknown_address_is_a_key_error(place: Path, address: str) -> None:
    """An address that is not there is KeyError."""
    with pytest.raises(KeyError):
        anyshard.open(place)[address]


def test_open_needs_no_torch(place: Path) -> None:
    """Reading a checkpoint offline does not import torch."""
    script = (
        "import sys, anyshard; c = anyshard.open(sys.argv[1]); print(c['model/big'][1, 0], c['extra/lr'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(place)], capture_output=True, text=True, timeout=60, check=True)
    assert "512 [0.1, 0.2] False\n" == done.stdout


def test_parent_is_what_was_loaded(place: Path) -> None:
    """A checkpoint names the one that the job had loaded before."""
    anyshard.load(place, {"extra": {"lr": []}})
    store = MemoryStore()
    anyshard.save(store, {"a": 1})
    parent = anyshard.open(store).manifest.parent
    assert parent is not None
    assert (5, anyshard.open(place).manifest.attempt) == (parent.step, parent.attempt)


class Pair(NamedTuple):
    """A named tuple, which comes back as one without its class."""

    one: int
    two: int


VALUES: dict[str, Any] = {
    "e": {Path("p"): 1, "x": 2, 7: 3},
    "d": deque([7]),
    "n": types.SimpleNamespace(lr=0.5),
    "o": OrderedDict(a=[1, (2, 3)]),
    "p": Pair(4, 5),
    "t": torch.ones(2),
}


@pytest.mark.parametrize(
    ("address", "expected"), [("e/x", 2), ("e/~i7", 3), ("d/0", 7), ("n/lr", 0.5), ("o/a/1/0", 2), ("p/1", 5), ("d", deque([7]))]
)
def test_values_are_where_errors_say(address: str, expected: object) -> None:
    """Values of every container are read by their addresses, and `in` says so."""
    anyshard.save(store := MemoryStore(), VALUES)
    checkpoint = anyshard.open(store)
    assert (expected, True) == (checkpoint[address], address in checkpoint)


@pytest.mark.parametrize("address", ["d/1", "d/00", "e/7", "n/x", "p/one", "t/0", "zz", "d/0/0", 5])
def test_what_is_not_there_is_not_contained(address: Any) -> None:
    """An address without anything is not in a checkpoint, whatever lies above it; nor is what is no address."""
    anyshard.save(store := MemoryStore(), VALUES)
    assert (False, True) == (address in anyshard.open(store), "t" in anyshard.open(store))


def test_options_and_sinks_of_an_open_checkpoint(place: Path) -> None:
    """Patience and sinks are the caller's, also for what is read later."""
    gate, events = threading.Event(), RecordingSink()
    store = FaultStore(LocalStore(str(place)), [Rule(Verb.OPEN_BLOB, "data/model/*", do_before(gate.wait))])
    options = anyshard.LoadOptions(timeout_s=0.2, threads=1)
    checkpoint = anyshard.open(store, options=options, sinks=[events])
    with pytest.raises(anyshard.StorageStuck):
        checkpoint["model/half"].numpy()
    gate.set()
    assert "open" in {name.partition(".")[0] for name in events.names()}
