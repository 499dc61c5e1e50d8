"""docs/format.md is enough to read every golden: the reader was written from that page and knows nothing of anyshard."""

from __future__ import annotations

import ast
import collections
import random
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.golden import reader, two_ranks
from tests.golden.contents import ROLES, make_role, make_state
from tests.golden.cut import ADDRESS, whole

HERE = Path(__file__).parent / "v1"
CUT = sorted(str(path.relative_to(HERE / "cut")) for path in (HERE / "cut").rglob("*") if path.is_file())
INLINE = 64 << 10  # arrays of so many bytes and more are stored as extents
SGD = {"lr": 0.25, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False, "foreach": None}
FACTS = {"plain": (7, {"loss": 0.5, "note": "golden"}), "two_blobs": (7, {}), "overwritten": (8, {})}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a tensor, as NumPy and ml_dtypes have them."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    data = np.empty(0, np.uint8) if not tensor.numel() else tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.view(dtype).reshape(tuple(tensor.shape))


def split(node: object, address: str, tensors: dict[str, np.ndarray]) -> object:
    """The value tree of a state, with marks for what is stored as extents; that goes to `tensors`."""
    if isinstance(node, torch.Tensor) or (isinstance(node, np.ndarray) and node.nbytes >= INLINE):
        is_array = isinstance(node, np.ndarray)
        tensors[address] = node if is_array else to_numpy(node)
        return ("mark", address, "ndarray" if is_array else "tensor")
    if type(node) is dict:
        return {key: split(value, f"{address}/{component(key)}", tensors) for key, value in node.items()}
    if type(node) is list:
        return [split(value, f"{address}/{position}", tensors) for position, value in enumerate(node)]
    return node


def component(key: object) -> str:
    """The part of an address that a key of a dict is; of other keys than str, only int stands above a tensor."""
    return key.replace("~", "~0").replace("/", "~1") if isinstance(key, str) else f"~i{key}"


def exact(node: object) -> object:
    """All that can be told of a value: types, order, and dtype, shape and bytes of arrays."""
    if isinstance(node, np.ndarray):
        return type(node), node.dtype, node.shape, node.tobytes()
    if isinstance(node, dict):
        return type(node), getattr(node, "default_factory", None), [(exact(key), exact(value)) for key, value in node.items()]
    if isinstance(node, list | tuple | collections.deque):
        return type(node), getattr(node, "maxlen", None), [exact(item) for item in node]
    if isinstance(node, set | frozenset):
        return type(node), {exact(item) for item in node}
    return type(node), repr(node)


def exact_by_address(tensors: dict[str, np.ndarray]) -> dict[str, object]:
    """The same of a reader's tensors, whose order says nothing."""
    return {address: exact(tensor) for address, tensor in tensors.items()}


@pytest.mark.parametrize("name", FACTS)
def test_reader_reads_every_tensor_and_value(name: str) -> None:
    """What the goldens hold comes back to the type and the byte, and nothing else does."""
    tensors: dict[str, np.ndarray] = {}
    values = {section: split(node, component(section), tensors) for section, node in make_state().items()}
    found = reader.read(HERE / name)
    assert exact_by_address(tensors) == exact_by_address(found["tensors"])
    assert exact(values) == exact(found["values"])
    assert FACTS[name] == (found["step"], found["user"])


def test_reader_reads_what_is_left_of_a_thinned_checkpoint() -> None:
    """What was kept comes back as of the golden that was not thinned, the rest is not there."""
    tensors: dict[str, np.ndarray] = {}
    kept = {name: node for name, node in make_state().items() if name in ("tensors", "step")}
    values = {section: split(node, component(section), tensors) for section, node in kept.items()}
    found = reader.read(HERE / "thinned")
    assert exact_by_address(tensors) == exact_by_address(found["tensors"])
    assert (exact(values), 7) == (exact(found["values"]), found["step"])


def test_reader_reads_each_part_of_a_step() -> None:
    """A step in parts is one checkpoint per part, and has metadata of its own."""
    found = reader.read(HERE / "parts")
    assert (7, {"metrics": {"reward": 0.5}}, list(ROLES)) == (found["step"], found["user"], list(found["parts"]))
    for role, seed in ROLES.items():
        tensors: dict[str, np.ndarray] = {}
        values = {section: split(node, component(section), tensors) for section, node in make_role(seed).items()}
        assert exact_by_address(tensors) == exact_by_address(found["parts"][role]["tensors"])
        assert exact(values) == exact(found["parts"][role]["values"])


def test_reader_refuses_a_part_that_is_not_the_one_that_is_named(tmp_path: Path) -> None:
    """The record of a step names each part by the attempt that saved it."""
    shutil.copytree(HERE / "parts", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "parts" / "actor")
    shutil.copytree(HERE / "parts" / "parts" / "critic", tmp_path / "parts" / "parts" / "actor")
    with pytest.raises(ValueError, match="attempt of part actor"):
        reader.read(tmp_path / "parts")


def test_reader_joins_the_boxes_of_a_cut_tensor() -> None:
    """A tensor cut into boxes over two ranks comes back whole."""
    found = reader.read(HERE / "cut")
    assert exact_by_address({ADDRESS: whole()}) == exact_by_address(found["tensors"])
    assert exact({"model": {"weight": ("mark", ADDRESS, "tensor")}}) == exact(found["values"])
    assert (7, {}) == (found["step"], found["user"])


def marks(*addresses: str) -> dict[str, object]:
    """Marks by the last components of their addresses."""
    return {address.split("/")[-1].replace("~0", "~"): ("mark", address, "tensor") for address in addresses}


def test_reader_unites_what_two_ranks_have() -> None:
    """Shards of two ranks are one tensor, and their value trees one tree."""
    found = reader.read(HERE / "two_ranks")
    own = {name: ("per rank", name) for name in ("loader", "mine", "alike", "rng")}
    addresses, (of_0, of_1) = list(two_ranks.TENSORS), two_ranks.OWN_VALUES
    group = {"options": {**SGD, "differentiable": False, "fused": None}, "params": {"bias": None, "weight": None}}
    weight = {"count": 4, **marks(addresses[2]), "rows": marks(*addresses[3:5])}
    first, second = marks("stages/layers.0"), marks("stages/layers.1")
    stages = {**first, "of_0": of_0, "both": marks("stages/both/layers.2"), **second, "of_1": of_1}
    tail = {"stages": stages, "values": {"epoch": 3}, "last": "of rank 1"}
    optimizer = {"state": {"weight": weight}, "param_groups": {"bias": group}}
    values = {"model": marks("model/weight", "model/bias"), "optimizer": optimizer, **own, **tail}
    assert exact_by_address({name: to_numpy(two_ranks.whole(name)) for name in addresses}) == exact_by_address(found["tensors"])
    assert exact(values) == exact(found["values"])


def random_state(seed: int) -> dict[str, object]:
    """The state of generators that were seeded so."""
    numbers = np.random.RandomState(seed).get_state(legacy=False)
    cpu = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
    return {"python": random.Random(seed).getstate(), "numpy": numbers, "cpu": cpu}


def test_reader_gives_each_key_its_values() -> None:
    """What each of two ranks has of its own is there under its key; of ranks with equal keys there is one."""
    found = reader.read(HERE / "two_ranks")["per_rank"]
    of_rank = [msgspec.msgpack.encode(["rank", rank, 2, [["dp", 2]]]) for rank in range(2)]
    loaders = [{"position": 10 + rank, "order": ("mark", f"loader/order/~r{rank}", "tensor")} for rank in range(2)]
    expected = {
        "loader": {msgspec.msgpack.encode(["key", ["loader", rank]]): loaders[rank] for rank in range(2)},
        "mine": {of_rank[rank]: {"rank": rank} for rank in range(2)},
        "alike": {msgspec.msgpack.encode(["key", "alike"]): [1.5]},
        "rng": {of_rank[rank]: random_state(rank) for rank in range(2)},
    }
    assert exact(expected) == exact(found)


def test_reader_gives_tied_tensors_one_array() -> None:
    """An alias is the array of the tensor that it is tied to."""
    tensors = reader.read(HERE / "plain")["tensors"]
    assert tensors["tensors/weight"] is tensors["tensors/aa_tied"] is tensors["tensors/zz_tied"]


def test_reader_does_not_find_a_deleted_step() -> None:
    """A deleted step is no checkpoint."""
    with pytest.raises(FileNotFoundError, match="deleted"):
        reader.read(HERE / "deleted")


def test_reader_does_not_find_a_step_without_a_manifest(tmp_path: Path) -> None:
    """A directory without a manifest is no checkpoint."""
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        reader.read(tmp_path)


@pytest.mark.parametrize("name", CUT)
def test_reader_refuses_a_flipped_byte(tmp_path: Path, name: str) -> None:
    """Every byte of every file is under a digest: one flipped byte, wherever it is, is damage."""
    shutil.copytree(HERE / "cut", tmp_path / "cut")
    path = tmp_path / "cut" / name
    data = path.read_bytes()
    for position in (*range(0, len(data), 53), len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            reader.read(tmp_path / "cut")


@pytest.mark.parametrize("name", [name for name in CUT if not name.startswith("manifest")])
@pytest.mark.parametrize("change", ["missing", "short", "link"])
def test_reader_refuses_a_file_that_is_not_whole(tmp_path: Path, name: str, change: str) -> None:
    """A file that is missing, short, or behind a symbolic link is damage."""
    shutil.copytree(HERE / "cut", tmp_path / "cut")
    path = tmp_path / "cut" / name
    data = path.read_bytes()
    path.unlink()
    if change == "short":
        path.write_bytes(data[:-1])
    elif change == "link":
        path.symlink_to(HERE / "cut" / name)
    with pytest.raises(ValueError, match="damaged"):
        reader.read(tmp_path / "cut")


def test_reader_is_short_and_independent() -> None:
    """The reader has at most 150 lines and imports neither anyshard nor anything else that might."""
    text = Path(reader.__file__).read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else alias.name for node in nodes for alias in node.names}
    roots = {str(name).partition(".")[0] for name in names}
    libraries = {"ml_dtypes", "msgspec", "numpy", "pyarrow", "xxhash", "zstandard"}
    assert text.count("\n") <= 150
    assert set() == roots - libraries - sys.stdlib_module_names
