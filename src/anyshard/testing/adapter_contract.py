"""The contract of an adapter: what taking a user's objects apart and putting them together again must keep, as tests.

Subclass it in a test module and say how the adapter's objects are built on this rank:

    class TestMyAdapter(AdapterContract):
        @pytest.fixture
        def make_training(self):
            return lambda: (MyModel(), MyOptimizer(...))      # each call gives new objects of the same structure

Under `torch.distributed` the tests are those of the rank that this process is: they call no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch

from anyshard.adapters.capture import capture
from anyshard.adapters.stability import find_eligible
from anyshard.adapters.target import LoadTarget, plan_load
from anyshard.adapters.tensors import bits_of, host_bits, local_tensor, torch_dtype
from anyshard.adapters.values import torch_types
from anyshard.errors import InvalidAppState, Mismatch, StateMismatch
from anyshard.options import LoadOptions
from anyshard.records.captured import Captured, Stored
from anyshard.records.dtypes import find_dtype
from anyshard.records.handles import BITS_DTYPES, Destination, Source
from anyshard.records.rank_table import make_rank_table
from anyshard.records.table_codec import fingerprint
from anyshard.records.tables import ShardTable
from anyshard.records.values import TensorMark, ValueRegistry, decode_value, encode_value
from anyshard.testing.fill import assert_same_bytes, fill
from anyshard.testing.layouts import Training
from anyshard.testing.training import Moment, take_step, training_state

MakeTraining: TypeAlias = Callable[[], Training]

_REGISTRY: Final = ValueRegistry().extended(torch_types())


class AdapterContract:
    """Subclass it with a `make_training` fixture; every test must pass."""

    @pytest.fixture
    def make_training(self) -> MakeTraining:
        """Override: how model and optimizer are built; the optimizer has not taken a step."""
        raise NotImplementedError

    @pytest.fixture
    def trained(self, make_training: MakeTraining) -> Training:
        """After a step, with bits everywhere that say where they belong."""
        return _fill(_step(make_training()), "trained ")

    # ------------------------------------------------------------------------------------------------------------ capture

    def test_capture_changes_nothing(self, trained: Training) -> None:
        """Bytes, objects and options stay as they are, and memory may be freed afterwards as before."""
        before = Moment.of(*trained), _list_ids(trained), _list_resizable(trained)
        _take(trained)
        assert before == (Moment.of(*trained), _list_ids(trained), _list_resizable(trained))

    def test_capture_takes_every_tensor(self, trained: Training) -> None:
        """Every tensor of model and optimizer is there, by its address, with its logical shape."""
        table = _take(trained).shards.tensors
        expected = {address: tuple(tensor.shape) for address, tensor in training_state(*trained).items()}
        assert expected == {address: table.shape(row) for row, address in enumerate(table.addresses)}

    def test_structure_is_the_same_each_time(self, make_training: MakeTraining, trained: Training) -> None:
        """Neither other bytes nor other objects of the same structure make it a structure that has to be planned anew."""
        expected = _identify(_take(trained))
        assert expected == _identify(_take(_fill(trained, "other ")))
        assert expected == _identify(_take(_step(make_training())))

    def test_sources_yield_the_bytes_of_their_regions(self, trained: Training) -> None:
        """Read in two parts, a source gives what the whole tensor has in the region, in C order."""
        captured = _take(trained)
        assert_same_bytes(_cut_regions(captured, "trained "), _read_regions(captured))

    def test_sources_copy_nothing_before_they_are_read(self, trained: Training) -> None:
        """They yield what is there when they are read."""
        captured = _take(trained)
        _fill(trained, "later ")
        assert_same_bytes(_cut_regions(captured, "later "), _read_regions(captured))

    # --------------------------------------------------------------------------------------------------------------- load

    def test_fresh_objects_become_what_was_saved(self, make_training: MakeTraining, trained: Training) -> None:
        """An optimizer without state gets it, options come back, and the parameters are the objects that they were."""
        fresh = _fill(make_training(), "fresh ")
        for group in fresh[1].param_groups:
            group["lr"] = 0.5
        params = _list_ids(fresh)
        _give(_take(trained), fresh)
        assert Moment.of(*trained).differences(Moment.of(*fresh)) == []
        assert params.items() <= _list_ids(fresh).items()

    def test_live_state_is_filled_in_place(self, make_training: MakeTraining, trained: Training) -> None:
        """Every tensor that is there is the same object afterwards."""
        live = _fill(_step(make_training()), "live ")
        expected = _list_ids(live)
        _give(_take(trained), live)
        assert Moment.of(*trained).differences(Moment.of(*live)) == []
        assert expected == _list_ids(live)

    def test_a_plan_changes_nothing(self, make_training: MakeTraining, trained: Training) -> None:
        """Until the fill begins, the live objects are what they were."""
        fresh = _fill(make_training(), "fresh ")
        before = Moment.of(*fresh), _list_ids(fresh)
        _plan(_take(trained), fresh)
        assert before == (Moment.of(*fresh), _list_ids(fresh))

    # --------------------------------------------------------------------------------------------------------- strictness

    def test_what_the_checkpoint_lacks_is_missing(self, make_training: MakeTraining, trained: Training) -> None:
        """It is an error that changes nothing; without `strict` it is listed and stays as it is, and the rest is loaded."""
        captured, fresh = _take(trained), _fill(make_training(), "fresh ")
        before, tree = Moment.of(*fresh), _model_tree(captured)
        lacked = tree.pop(next(iter(tree))).address
        assert _list_differences(captured, fresh) == [(Mismatch.MISSING, lacked)]
        assert before.differences(Moment.of(*fresh)) == []
        assert _give(captured, fresh, strict=False).missing == (lacked,)
        assert Moment.of(*trained).differences(Moment.of(*fresh)) == [lacked]

    def test_what_the_objects_lack_is_unexpected(self, make_training: MakeTraining, trained: Training) -> None:
        """It is an error; without `strict` it is listed and the rest is loaded."""
        captured, fresh = _take(trained), _fill(make_training(), "fresh ")
        tree = _model_tree(captured)
        tree["surplus"] = next(iter(tree.values()))
        assert _list_differences(captured, fresh) == [(Mismatch.UNEXPECTED, "model/surplus")]
        assert _give(captured, fresh, strict=False).unexpected == ("model/surplus",)
        assert Moment.of(*trained).differences(Moment.of(*fresh)) == []

    # ------------------------------------------------------------------------------------------------- what has no memory

    def test_memory_that_was_freed_is_an_error(self, trained: Training) -> None:
        """Freed after the capture it is an error when it is read, and later of every capture and load; nothing crashes."""
        captured, address = _take(trained), _free_one(trained)
        shards = captured.shards
        rows = np.flatnonzero(shards.tensor == shards.tensors.rows[address])
        with pytest.raises(InvalidAppState, match=f"^{address}: .*freed"):
            _read(captured.sources[rows[0]])
        with pytest.raises(InvalidAppState, match=f"^{address}: .*freed"):
            _take(trained)
        with pytest.raises(InvalidAppState, match=f"^{address}: .*freed"):
            _plan(captured, trained)

    def test_memory_that_a_lazy_snapshot_lacks_is_an_error(self, trained: Training) -> None:
        """What may be copied after the call is found freed when it is read then; nothing crashes."""
        captured = _take(trained)
        eligible = find_eligible(_name_state(trained), captured, _REGISTRY, min_nbytes=1)
        lazy = [captured.sources[row] for row in np.flatnonzero(eligible.is_lazy)]
        for tensor in _locals(trained).values():
            tensor.untyped_storage().resize_(0)
        assert lazy
        for source in lazy:
            with pytest.raises(InvalidAppState, match="freed"):
                _read(source)

    def test_meta_tensors_are_refused(self, make_training: MakeTraining, trained: Training) -> None:
        """What has no memory yet cannot be saved, and a load into it would do nothing: the error says `to_empty`."""
        meta = make_training()[0].to("meta")
        with pytest.raises(InvalidAppState, match=r"^model/.*to_empty"):
            capture({"model": meta}, registry=_REGISTRY)
        with pytest.raises(InvalidAppState, match=r"^model/.*to_empty"):
            plan_load({"model": meta}, _store(_take(trained)), options=LoadOptions(), registry=_REGISTRY, checkpoint="contract")


def _step(training: Training) -> Training:
    take_step(*training)
    return training


def _fill(training: Training, seed: str) -> Training:
    """Fill all that is there with bits of its address, of tied ones the smallest, under which they are stored."""
    for address, tensor in sorted(training_state(*training).items(), key=lambda item: item[0].encode(), reverse=True):
        fill(tensor, seed + address)
    return training


def _locals(training: Training) -> dict[str, torch.Tensor]:
    return {address: local_tensor(tensor, address) for address, tensor in training_state(*training).items()}


def _list_ids(training: Training) -> dict[str, int]:
    return {address: id(tensor) for address, tensor in training_state(*training).items()}


def _list_resizable(training: Training) -> list[str]:
    return [address for address, tensor in _locals(training).items() if tensor.untyped_storage().resizable()]


def _free_one(training: Training) -> str:
    """Free the memory of one tensor of which this rank holds something."""
    address, tensor = next((address, tensor) for address, tensor in _locals(training).items() if tensor.numel())
    tensor.untyped_storage().resize_(0)
    return address


def _name_state(training: Training) -> dict[str, object]:
    """The app state."""
    model, optimizer = training
    return {"model": model, "optimizer": optimizer}


def _take(training: Training) -> Captured:
    return capture(_name_state(training), registry=_REGISTRY)


def _model_tree(captured: Captured) -> dict[str, TensorMark]:
    """The tree of the model, to be changed: FQN -> mark."""
    tree: Any = captured.trees["model"]
    return tree  # type: ignore[no-any-return]


def _identify(captured: Captured) -> str:
    table = make_rank_table(captured.shards, tuple(captured.trees), buffers=captured.buffers)
    return fingerprint(table, world_size=1, options={})


def _read(source: Source) -> bytes:
    """All bytes of a source, read in two parts."""
    whole = bytearray(source.nbytes)
    middle = source.nbytes // 32 * 16  # a border of elements of any size
    for start, stop in ((0, middle), (middle, source.nbytes)):
        if stop > start:
            source.read_into(start, memoryview(whole)[start:stop])
    return bytes(whole)


def _name_regions(captured: Captured) -> Iterator[tuple[str, int]]:
    """A name for each region, and its row."""
    shards = captured.shards
    for row, tensor in enumerate(shards.tensor):
        yield f"{shards.tensors.addresses[tensor]} at {shards.region(row)}", row


def _read_regions(captured: Captured) -> dict[str, bytes]:
    return {name: _read(captured.sources[row]) for name, row in _name_regions(captured)}


def _cut_regions(captured: Captured, seed: str) -> dict[str, bytes]:
    """The regions as cut from whole tensors with the bits of this seed."""
    return {name: _cut_region(captured.shards, row, seed) for name, row in _name_regions(captured)}


def _cut_region(shards: ShardTable, row: int, seed: str) -> bytes:
    tensors, tensor = shards.tensors, shards.tensor[row]
    whole = torch.empty(tensors.shape(tensor), dtype=torch_dtype(tensors.dtypes[tensor]))
    fill(whole, seed + tensors.addresses[tensor])
    box = tuple(slice(offset, offset + length) for offset, length in zip(*shards.region(row), strict=True))
    return host_bits(bits_of(whole))[box].tobytes()


def _store(captured: Captured) -> Stored:
    """What a checkpoint of it would hold."""
    encoded = {name: encode_value(tree, address=name, registry=_REGISTRY) for name, tree in captured.trees.items()}
    trees = {name: decode_value(data, registry=_REGISTRY, file=name) for name, data in encoded.items()}
    return Stored(captured.shards.tensors, trees)


def _plan(captured: Captured, training: Training, **options: Any) -> LoadTarget:
    state, loads = _name_state(training), LoadOptions(**options)
    return plan_load(state, _store(captured), options=loads, registry=_REGISTRY, checkpoint="contract")


def _list_differences(captured: Captured, training: Training) -> list[tuple[Mismatch, str]]:
    with pytest.raises(StateMismatch) as caught:
        _plan(captured, training)
    return [(difference.kind, difference.address) for difference in caught.value.differences]


def _give(captured: Captured, training: Training, **options: Any) -> LoadTarget:
    """Load into objects that lie as those that were captured."""
    target = _plan(captured, training, **options)
    shards, wanted = captured.shards, target.wanted
    rows = {(shards.tensors.addresses[tensor], shards.region(row)): row for row, tensor in enumerate(shards.tensor)}
    for row, destination in enumerate(target.destinations):
        address, region = wanted.tensors.addresses[wanted.tensor[row]], wanted.region(row)
        itemsize = find_dtype(wanted.tensors.dtypes[wanted.tensor[row]]).itemsize
        data = _read(captured.sources[rows[address, region]])
        _put(destination, np.frombuffer(data, BITS_DTYPES[itemsize]).reshape(region[1]))
    target.apply()
    return target


def _put(destination: Destination, bits: np.ndarray[Any, Any]) -> None:
    memory = destination.memory()
    if memory is not None:
        memory[:] = bits.tobytes()
    else:
        destination.place(tuple(slice(0, length) for length in bits.shape), bits)
