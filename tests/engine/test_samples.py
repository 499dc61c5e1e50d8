"""Samples: equal bytes always agree, what differs is found, and only what is said is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from anyshard.engine.samples import Sampling, digest_rows, digest_sets, list_row_digests, make_seed
from anyshard.records.handles import BITS_DTYPES, ArraySource, Source
from anyshard.records.rank_table import RankTable, make_rank_table
from anyshard.records.replica_digests import SetDigest
from anyshard.records.tables import IntColumn, ShardTable, make_tensor_table, whole_shards

KIB, MIB = 1 << 10, 1 << 20
FULL, SAMPLED = Sampling(1, in_full=True), Sampling(1, in_full=False)
Bits = NDArray[np.generic]
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}


def make_table(*arrays: Bits, buffers: Sequence[str] = ()) -> RankTable:
    """A rank that holds the whole of tensors a/0, a/1, ..."""
    names = [f"a/{i}" for i in range(len(arrays))]
    dtypes = [DTYPES[array.itemsize] for array in arrays]
    tensors = make_tensor_table(names, dtypes, [array.shape for array in arrays], {})
    return make_rank_table(whole_shards(tensors), ("a",), buffers=frozenset(buffers))


def digest_all(sources: Sequence[Source], table: RankTable, sets: IntColumn, sampling: Sampling) -> dict[int, SetDigest]:
    """The digests of all sets of a rank."""
    return digest_sets(digest_rows(sources, table, replica_set=sets, sampling=sampling), table, replica_set=sets)


def digest(*arrays: Bits, sampling: Sampling = SAMPLED, buffers: Sequence[str] = ()) -> SetDigest:
    """The digest of one set that holds all of these."""
    sources, table = [ArraySource(array) for array in arrays], make_table(*arrays, buffers=buffers)
    return digest_all(sources, table, np.zeros(len(arrays), dtype=np.int64), sampling)[0]


class RecordingSource(ArraySource):
    """A source that notes what was read of it."""

    def __init__(self, bits: Bits) -> None:
        super().__init__(bits)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, start: int, out: memoryview) -> None:
        """Note the range and read it."""
        self.reads.append((start, start + len(out)))
        super().read_into(start, out)


def list_reads(array: Bits, sampling: Sampling) -> list[tuple[int, int]]:
    """The ranges that are read of a tensor."""
    source = RecordingSource(array)
    digest_rows([source], make_table(array), replica_set=np.zeros(1, dtype=np.int64), sampling=sampling)
    return source.reads


@pytest.mark.parametrize(("nbytes", "sampling"), [(3 * MIB + 5, FULL), (64 * KIB, SAMPLED), (256 * KIB, SAMPLED), (0, SAMPLED)])
def test_all_bytes_are_read(nbytes: int, sampling: Sampling) -> None:
    """In full, and of short regions always, every byte is read once, in pieces of at most 1 MiB."""
    reads = list_reads(np.zeros(nbytes, dtype=np.uint8), sampling)
    assert [(start, min(start + MIB, nbytes)) for start in range(0, nbytes, MIB)] == reads


@given(st.sampled_from(sorted(DTYPES)), st.integers(256 * KIB, MIB), st.integers(0, (1 << 64) - 1))
@settings(max_examples=50)
def test_a_long_region_is_read_in_64_cells(itemsize: int, nbytes: int, seed: int) -> None:
    """There is a cell of 4 KiB on element borders in each of 64 stretches as even as elements allow, none past the end."""
    array = np.zeros(nbytes // itemsize + 1, dtype=BITS_DTYPES[itemsize])
    reads = list_reads(array, Sampling(seed, in_full=False))
    assert [4096] * 64 == [stop - start for start, stop in reads]
    assert [0] * 64 == [start % itemsize for start, _ in reads]
    for i, (start, stop) in enumerate(reads):
        assert i * array.size // 64 * itemsize <= start
        assert stop <= (i + 1) * array.size // 64 * itemsize


@given(st.data())
@settings(max_examples=50)
def test_any_changed_byte_is_found_where_all_are_read(data: st.DataObject) -> None:
    """One bit that differs, in a short region or with in_full, makes another digest."""
    nbytes, sampling = data.draw(st.sampled_from([(1, SAMPLED), (64 * KIB, SAMPLED), (MIB + 9, FULL)]))
    array = np.zeros(nbytes, dtype=np.uint8)
    before = digest(array, sampling=sampling)
    array[data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert before != digest(array, sampling=sampling)


@given(st.integers(0, 31 * MIB // 32 - 1), st.integers(0, 1000))
@settings(max_examples=50)
def test_a_changed_block_of_two_stretches_is_found(start: int, seed: int) -> None:
    """Samples see any change of all bytes in a row of 1/32 of a region, wherever it begins."""
    array = np.zeros(MIB, dtype=np.uint8)
    before = digest(array, sampling=Sampling(seed, in_full=False))
    array[start : start + MIB // 32] = 1
    assert before != digest(array, sampling=Sampling(seed, in_full=False))


@pytest.mark.parametrize("sampling", [FULL, SAMPLED])
@given(st.permutations(range(3)), st.sampled_from(sorted(DTYPES)), st.integers(-1, 2))
@settings(max_examples=20)
def test_equal_bytes_agree_whatever_their_strides(sampling: Sampling, order: list[int], itemsize: int, reverse: int) -> None:
    """A rank whose tensor lies otherwise in memory has the same digest."""
    words = np.arange(2 * 48 * 40 * 100, dtype=np.uint64) * 0x9E3779B97F4A7C15
    dense = np.resize(words.view(BITS_DTYPES[itemsize]), (48, 40, 200))
    strided = np.ascontiguousarray(dense.transpose(order)).transpose(np.argsort(order))
    if reverse >= 0:
        strided = np.flip(np.ascontiguousarray(np.flip(strided, reverse)), reverse)
    assert digest(dense, sampling=sampling) == digest(strided, sampling=sampling)


def test_another_seed_moves_the_cells() -> None:
    """The next save looks elsewhere, and tensors of one shape are not all read at the same places."""
    array = np.zeros(MIB, dtype=np.uint8)
    first, second = (list_reads(array, Sampling(seed, in_full=False)) for seed in (1, 2))
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 60
    sources = [RecordingSource(array) for _ in range(2)]
    digest_rows(sources, make_table(array, array), replica_set=np.zeros(2, dtype=np.int64), sampling=SAMPLED)
    assert sources[0].reads != sources[1].reads


def cut_in_two(order: list[int]) -> tuple[RankTable, list[ArraySource], IntColumn]:
    """Two halves of a matrix, in sets 5 and 7, and a vector in set 5, in this order of rows."""
    vector, matrix = np.full(8, 3, dtype=np.uint8), np.arange(600_000, dtype=np.uint32).reshape(2, -1)
    tensors = make_tensor_table(["a/v", "a/w"], ["uint8", "uint32"], [vector.shape, matrix.shape], {})
    columns = np.array([0, 1, 1]), np.array([[0, 0], [0, 0], [1, 0]]), np.array([[8, 1], [1, 300_000], [1, 300_000]])
    sources = [ArraySource(array) for array in (vector, matrix[:1], matrix[1:])]
    table = make_rank_table(ShardTable(tensors, *(column[order] for column in columns)), ("a",))
    return table, [sources[row] for row in order], np.array([5, 5, 7])[order]


def test_the_order_of_rows_does_not_matter() -> None:
    """Rows count in the order of address and offsets, however a rank holds them, each in its own set."""
    digests = []
    for order in ([0, 1, 2], [2, 1, 0]):
        table, sources, sets = cut_in_two(order)
        digests.append(digest_all(sources, table, sets, SAMPLED))
    assert digests[0] == digests[1]
    assert [5, 7] == list(digests[0])


def test_rows_in_no_set_are_not_read() -> None:
    """What nobody else holds costs nothing."""
    array = np.zeros(8, dtype=np.uint8)
    source = RecordingSource(array)
    assert {} == digest_all([source], make_table(array), np.array([-1]), FULL)
    assert [] == source.reads


def test_buffers_are_digested_apart() -> None:
    """A buffer alters its own digest only, and a set of buffers only has no other."""
    one, two, other = (np.full(8, value, dtype=np.uint8) for value in (1, 2, 3))
    before, after = digest(one, two, buffers=["a/1"]), digest(one, other, buffers=["a/1"])
    assert (before.main, 1, [4]) == (after.main, len(after.buffers), [len(buffer) for buffer in after.buffers])
    assert before.buffers != after.buffers
    assert b"" == digest(one, buffers=["a/0"]).main


def test_swapped_tensors_are_found() -> None:
    """Ranks that hold the same bytes under exchanged names differ."""
    one, two = (np.full(8, value, dtype=np.uint8) for value in (1, 2))
    assert digest(one, two) != digest(two, one)


@pytest.mark.parametrize("sampling", [FULL, SAMPLED])
def test_row_digests_say_which_tensor_differs(sampling: Sampling) -> None:
    """Of the sets that are asked for every tensor but buffers is listed, and exactly the changed one has another digest."""
    arrays = [np.zeros(MIB, dtype=np.uint8) for _ in range(4)]
    table, sets = make_table(*arrays, buffers=["a/3"]), np.array([2, 2, 4, 2])
    before, after = (
        list_row_digests(
            digest_rows([ArraySource(a) for a in held], table, replica_set=sets, sampling=sampling),
            table,
            replica_set=sets,
            sets=[2],
        )
        for held in (arrays, [arrays[0], arrays[1] + 1, arrays[2] + 1, arrays[3] + 1])
    )
    assert {2: ["a/0", "a/1"]} == {number: list(digests) for number, digests in before.items()}
    assert ["a/1"] == [address for address, own in before[2].items() if own != after[2][address]]


def test_row_digests_cover_all_rows_of_a_tensor() -> None:
    """A tensor of several rows in one set has one digest of them all; rows in other sets are apart."""
    table, sources, sets = cut_in_two([0, 1, 2])
    rows = digest_rows(sources, table, replica_set=sets, sampling=FULL)
    apart = list_row_digests(rows, table, replica_set=sets, sets=(5, 7, 9))
    assert {5: ["a/v", "a/w"], 7: ["a/w"]} == {number: list(digests) for number, digests in apart.items()}
    together = list_row_digests(rows, table, replica_set=sets * 0, sets=(0,))
    assert together[0]["a/w"] not in (apart[5]["a/w"], apart[7]["a/w"])


def test_the_order_of_rows_does_not_matter_for_single_tensors() -> None:
    """Ranks that hold the rows of a tensor in another order list the same digest of it."""
    listed = []
    for order in ([0, 1, 2], [2, 1, 0]):
        table, sources, sets = cut_in_two(order)
        rows = digest_rows(sources, table, replica_set=sets * 0, sampling=FULL)
        listed.append(list_row_digests(rows, table, replica_set=sets * 0, sets=(0,)))
    assert listed[0] == listed[1]


def test_nothing_is_read_twice() -> None:
    """Digests of sets and of tensors are made from those of rows, which are read once each."""
    arrays = [np.zeros(size, dtype=np.uint8) for size in (3, 3 * MIB)]
    sources, table, sets = [RecordingSource(array) for array in arrays], make_table(*arrays), np.zeros(2, dtype=np.int64)
    rows = digest_rows(sources, table, replica_set=sets, sampling=FULL)
    digest_sets(rows, table, replica_set=sets)
    list_row_digests(rows, table, replica_set=sets, sets=[0])
    assert [1, 3] == [len(source.reads) for source in sources]


def test_seeds_come_from_texts() -> None:
    """A text, of any characters that a path may have, has one seed of 64 bits, and another text another one."""
    seeds = [make_seed(f"plan save of /mnt/{name}") for name in ("a", "b", "\N{GREEK SMALL LETTER ALPHA}", "\udcff")]
    assert (4, True) == (len(set(seeds)), all(0 <= seed < 1 << 64 for seed in seeds))
    assert 0x27B1F9E967E45624 == make_seed("plan save of /mnt/a")
