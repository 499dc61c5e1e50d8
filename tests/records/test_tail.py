import dataclasses
import struct

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedFormat
from anyshard.records.footer import FOOTER_NBYTES, Footer, decode_footer, digest_of, encode_footer
from anyshard.records.slot_table import SlotColumns, SlotTable
from anyshard.records.tail import Tail, decode_head, decode_tail, encode_head, encode_tail, join_tail, measure_blob
from tests.records.samples import ATTEMPT, make_tail

POSITION = make_tail().tail_position
TABLE = SlotTable(
    SlotColumns(**{field.name: getattr(make_tail(), field.name) for field in dataclasses.fields(SlotColumns)}), make_tail().also
)


def decode(data, *, tail_position=POSITION, max_slots=4):
    return decode_tail(data, tail_position=tail_position, max_slots=max_slots, file="blob")


def take_apart(data):
    """The stream of slots, the bytes behind it and the footer of a tail."""
    footer = decode_footer(data[-FOOTER_NBYTES:], file="blob")
    raw = zstandard.ZstdDecompressor().decompress(data[: footer.slots_nbytes])
    return raw, data[footer.slots_nbytes : footer.slots_nbytes + 8 * footer.num_cells], footer


def put_together(frame, cells, footer, **changes):
    """A whole tail with right lengths and digests, but for the members that `changes` names."""
    body = frame + cells
    body += bytes(-(POSITION + len(body) + FOOTER_NBYTES) % 4096)
    right = dataclasses.replace(
        footer,
        blob_nbytes=POSITION + len(body) + FOOTER_NBYTES,
        slots_nbytes=len(frame),
        cells_position=POSITION + len(frame),
        body_digest=digest_of(body),
    )
    return body + encode_footer(dataclasses.replace(right, **changes))


def replace_last(column, value):
    """The column with another last value."""
    return np.append(column[:-1], value)


def repack(raw, **changes):
    """The sample's tail with another stream of slots."""
    _, cells, footer = take_apart(encode_tail(make_tail()))
    changes = {"slots_raw_nbytes": len(raw)} | changes
    return put_together(zstandard.compress(raw), cells, footer, **changes)


def change_table(change, **options):
    """The sample's tail after `change` of its table (a `pa.Table`), written with `options` of Arrow."""
    table = change(pa.ipc.open_stream(take_apart(encode_tail(make_tail()))[0]).read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return repack(sink.getvalue().to_pybytes())


def set_column(name, values, kind=None):
    def change(table):
        position = table.schema.get_field_index(name)
        array = values if isinstance(values, pa.Array) else pa.array(values, kind or table.schema.field(position).type)
        return table.set_column(position, name, array)

    return change


def assert_same_tail(expected, found):
    for field in dataclasses.fields(Tail):
        left, right = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), field.name
        else:
            assert left == right, field.name


def test_tail_comes_back_equal():
    """Decoding gives what was encoded, and the blob's length is a multiple of 4096."""
    data = encode_tail(make_tail())
    assert_same_tail(make_tail(), decode(data))
    assert 0 == (POSITION + len(data)) % 4096


def test_tail_of_a_later_blob_has_no_values_slot():
    """Blobs from k = 1 on hold tensors only; a dtype of a later release can be listed, whatever its size."""
    whole = make_tail()
    columns = "position nbytes addresses ndims shapes offsets lengths".split()
    tail = dataclasses.replace(
        whole,
        **{name: getattr(whole, name)[:3] for name in columns},
        dtypes=("int64", "bfloat16", "float6"),
        identity=dataclasses.replace(whole.identity, k=1, step=None, run_id=None),
        also={},
    )
    assert_same_tail(tail, decode(encode_tail(tail), max_slots=3))


def test_length_of_a_tail_does_not_depend_on_cell_digests():
    """A writer can preallocate the blob before it knows a digest."""
    other = make_tail(cell_digests=np.array([2**64 - 1], dtype=np.uint64))
    assert len(encode_tail(make_tail())) == len(encode_tail(other))
    assert 2**64 - 1 == decode(encode_tail(other)).cell_digests[0]


def test_slots_made_once_are_packed_for_every_save():
    """A table is packed for other writers, and with another extent of its last slot: as if it were made anew each time."""
    for position, nbytes in ((1152, 10), (4096, 70_000), (1152, 0)):
        for step in (1, 2):
            tail = make_tail(identity=dataclasses.replace(make_tail().identity, step=step))
            tail = dataclasses.replace(
                tail, position=replace_last(tail.position, position), nbytes=replace_last(tail.nbytes, nbytes)
            )
            slots = TABLE.pack(tail.identity, last=(position, nbytes))
            options = {"cell_nbytes": tail.cell_nbytes, "tail_position": tail.tail_position}
            assert encode_tail(tail) == join_tail(slots, tail.cell_digests, **options)


def test_length_of_a_blob_is_known_before_its_digests():
    """What a writer reserves is what it writes."""
    data, tail = encode_tail(make_tail()), make_tail()
    assert POSITION + len(data) == measure_blob(TABLE.pack(tail.identity), num_cells=1, tail_position=POSITION)


def test_head_is_64_bytes_and_names_the_attempt():
    """A blob says at its start what it is; anything else is damage, a later version a later format."""
    head = encode_head(ATTEMPT)
    assert (64, ATTEMPT) == (len(head), decode_head(head, file="blob"))
    for bad in (head[:63], b"x" + head[1:], head[:16] + b"A" + head[17:]):
        with pytest.raises(CheckpointDamaged):
            decode_head(bad, file="blob")
    with pytest.raises(UnsupportedFormat):
        decode_head(head[:8] + struct.pack("<I", 2) + head[12:], file="blob")


def test_every_flipped_bit_is_found_by_the_footers_digests():
    """Also without the manifest (recovery), no bit of a tail can change unseen."""
    data = encode_tail(make_tail())
    for position in range(0, len(data), 3):
        flipped = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        with pytest.raises((CheckpointDamaged, UnsupportedFormat)):
            decode(flipped)


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 129, 1000, -1, -64])
def test_cut_tail_is_damaged(nbytes):
    """A tail of any other length is refused."""
    with pytest.raises(CheckpointDamaged):
        decode(encode_tail(make_tail())[:nbytes])


@pytest.mark.parametrize(
    "changes",
    [
        {"tail_position": POSITION + 1},
        {"blob_nbytes": 1 << 60},
        {"slots_nbytes": 1 << 60},
        {"slots_nbytes": 0},
        {"slots_raw_nbytes": 0},
        {"slots_raw_nbytes": 10},
        {"slots_raw_nbytes": 1 << 40},
        {"num_slots": 0},
        {"num_slots": 3},
        {"num_slots": 5},
        {"num_slots": 1 << 63},
        {"cells_position": 0},
        {"num_cells": 2},
        {"num_cells": 1 << 61},
        {"cell_nbytes": 0},
        {"cell_nbytes": 4096},
        {"cell_nbytes": 100_000},
        {"cell_nbytes": 1 << 40},
        {"body_digest": bytes(16)},
    ],
)
def test_lying_footer_is_damage(changes):
    """Each number of the footer is checked before it is used, also where the digests fit."""
    _, cells, footer = take_apart(encode_tail(make_tail()))
    frame = encode_tail(make_tail())[: footer.slots_nbytes]
    assert_same_tail(make_tail(), decode(put_together(frame, cells, footer)))
    with pytest.raises(CheckpointDamaged, match="blob"):
        decode(put_together(frame, cells, footer, **changes))


def test_later_blob_version_is_unsupported():
    """A newer footer is told from a damaged one."""
    data = bytearray(encode_tail(make_tail()))
    data[-FOOTER_NBYTES + 8] = 2
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode(bytes(data))


def test_more_slots_than_the_manifest_allows_is_damage():
    """The manifest bounds what a tail may unfold to."""
    with pytest.raises(CheckpointDamaged, match="1 to 3 slots"):
        decode(encode_tail(make_tail()), max_slots=3)


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("position", [64, 128, 512, None], "null"),
        ("position", [0, 128, 512, 1152], "head and tail"),
        ("position", [64, 128, 512, 1 << 62], "head and tail"),
        ("position", [64, 128, 128, 1152], "behind"),
        ("position", [128, 64, 512, 1152], "behind"),
        ("position", [64, 129, 513, 1153], "aligned|tail"),
        ("nbytes", [8, 384, 640, -1], "negative"),
        ("nbytes", [8, 384, 641, 10], "stored_nbytes"),
        ("stored_nbytes", [8, 384, 640, (1 << 63) - 1], "stored_nbytes"),
        ("frame_nbytes", [None, 64, None, None], "frame_nbytes"),
        ("frames", [None, [1], None, None], "frames"),
        ("ndim", [0, 3, 2, 0], "ndim from 0 to 2"),
        ("ndim", [0, -1, 2, 0], "ndim from 0 to 2"),
        ("ndim", [0, 1, 2, 0], "null beyond"),
        ("ndim", [0, None, 2, 0], "null"),
        ("shape_0", [None, 8, None, None], "shape"),
        ("shape_0", [None, 8, 1 << 62, None], "2\\^62"),
        ("shape_0", [None, -8, 8, None], "negative"),
        ("offset_0", [None, 0, 4, None], "within the shape"),
        ("offset_0", [None, 0, (1 << 63) - 1, None], "within the shape"),
        ("length_0", [None, 2, 5, None], "nbytes equal"),
        ("length_0", [None, 0, 5, None], "at least one element"),
        ("length_1", [None, 64, (1 << 63) - 1, None], "within the shape"),
    ],
)
def test_wrong_value_in_a_column_is_damage(column, values, reason):
    """Every column is checked against every rule of the format."""
    with pytest.raises(CheckpointDamaged, match=reason):
        decode(change_table(set_column(column, values)))


def dictionary(values):
    return pa.array(values, pa.string()).dictionary_encode()


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("address", dictionary(["a", None, "b", "c"]), "null"),
        ("dtype", dictionary(["int64", "bfloat16", "float32", "msgpack"]), "nbytes equal"),
        ("dtype", dictionary(["int64", "bfloat16", "bfloat16", "int8"]), "msgpack"),
        ("dtype", dictionary(["msgpack", "bfloat16", "bfloat16", "msgpack"]), "msgpack"),
        ("address", pa.array(["a", "b", "c", "d"]), "column address: expected dictionary"),
        ("position", pa.array([64, 128, 512, 1152], pa.int32()), "column position: expected int64"),
        ("address", pa.DictionaryArray.from_arrays(pa.array([0, 1, 9, 0], pa.int32()), ["a", "b"], safe=False), "damage"),
        ("address", pa.DictionaryArray.from_arrays(pa.array([0, 0, 0, 0], pa.int32()), pa.array(["a", None])), "nulls"),
    ],
)
def test_wrong_array_in_a_column_is_damage(column, values, reason):
    """Types are exact, and codes beyond a dictionary are found before they are followed."""
    with pytest.raises(CheckpointDamaged, match=reason):
        decode(change_table(set_column(column, values)))


@pytest.mark.parametrize("column", ["codec", "encoding"])
def test_unknown_codec_is_unsupported(column):
    """A codec of a later release is named, and is not damage."""
    with pytest.raises(UnsupportedFormat, match=f"{column} 'brotli'"):
        decode(change_table(set_column(column, [None, "brotli", None, None])))


def test_further_columns_are_ignored_and_missing_ones_are_damage():
    """A later release may add columns, never drop one."""
    added = change_table(lambda table: table.append_column("added", pa.array([[1], None, [], [2, 3]])))
    assert_same_tail(make_tail(), decode(added))
    for name in pa.ipc.open_stream(take_apart(encode_tail(make_tail()))[0]).schema.names:
        with pytest.raises(CheckpointDamaged):
            decode(change_table(lambda table, name=name: table.drop_columns([name])))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_bodies_are_refused(codec):
    """Only the outer frame, whose length is bounded, may be compressed."""
    with pytest.raises(CheckpointDamaged, match="compressed body"):
        decode(change_table(lambda table: table, compression=codec))


def test_stream_of_two_batches_is_damage():
    """The slots are one batch."""
    with pytest.raises(CheckpointDamaged, match="one batch"):
        decode(change_table(lambda table: pa.concat_tables([table.slice(0, 2), table.slice(2)])))


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2000)),
        zstandard.compress(bytes(2000)) + b"\0",
        zstandard.compress(bytes(2001)),
        zstandard.compress(bytes(2000))[:-1],
        b"",
        b"not zstd",
    ],
)
def test_frame_that_is_not_exactly_the_slots_is_damage(frame):
    """One whole frame that declares the length that the footer names, and no byte more."""
    _, cells, footer = take_apart(encode_tail(make_tail()))
    with pytest.raises(CheckpointDamaged):
        decode(put_together(frame, cells, footer, slots_raw_nbytes=2000))


@pytest.mark.parametrize(
    ("metadata", "reason", "kind"),
    [
        (b"{}", "byte_order", CheckpointDamaged),
        (b"", "JSON", CheckpointDamaged),
        (None, "JSON", CheckpointDamaged),
        ({b'"little"': b'"big"'}, "byte order", UnsupportedFormat),
        ({b"xxh3-64": b"sha256"}, "cell digest", UnsupportedFormat),
        ({b'"small":64': b'"small":0'}, "small", CheckpointDamaged),
        ({b'"small":64': b'"small":512'}, "aligned", CheckpointDamaged),
        ({b'"rank":0': b'"rank":-1'}, "rank", CheckpointDamaged),
        ({b'"k":0': b'"k":1'}, "msgpack", CheckpointDamaged),
        ({b'["model/tied"]': b'["model/tied",1]'}, "also", CheckpointDamaged),
        ({ATTEMPT.encode(): b"x"}, "attempt", CheckpointDamaged),
    ],
)
def test_wrong_metadata_is_refused(metadata, reason, kind):
    """What the tail records about itself is checked, and constants of a later release are told from damage."""

    def change(table):
        text = table.schema.metadata[b"anyshard"]
        if isinstance(metadata, dict):
            ((old, new),) = metadata.items()
            assert old in text
            text = text.replace(old, new)
        else:
            text = metadata
        return table.replace_schema_metadata(None if text is None else {b"anyshard": text})

    with pytest.raises(kind, match=reason):
        decode(change_table(change))


def test_addresses_that_no_reader_would_take_are_refused_before_writing():
    """The bound of readers holds for writers as well."""
    with pytest.raises(LimitExceeded, match="addresses"):
        encode_tail(make_tail(addresses=("a" * 400_000, "b", "c", "d")))


def test_footer_is_the_table_of_the_format_page():
    """Positions of all members of the footer are as docs/format.md says."""
    footer = Footer(*range(1, 9), body_digest=b"b" * 16)
    data = encode_footer(footer)
    assert list(range(1, 9)) == list(struct.unpack_from("<8Q", data, 16))
    assert (b"\x89ANYSHF\n", 1, 128, b"b" * 16) == (data[:8], *struct.unpack_from("<II", data, 8), data[96:112])
    assert footer == decode_footer(data, file="blob")
