import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anyshard.records.parquet_pages import measure_parquet


def write(table, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_sizes_are_those_that_the_writer_states(compression, use_dictionary, version):
    """Rows per group agree, and pages (all but their headers) add up to the writer's own totals."""
    table = pa.table({"a": range(1000), "b": [["x", "yy"]] * 1000, "c": [None, 1.5] * 500})
    data = write(
        table,
        compression=compression,
        use_dictionary=use_dictionary,
        data_page_version=version,
        row_group_size=300,
        write_page_index=True,
        data_page_size=512,
    )
    metadata = pq.read_metadata(pa.BufferReader(data))
    stated = sum(metadata.row_group(g).column(c).total_uncompressed_size for g in range(4) for c in range(3))
    sizes = measure_parquet(data)
    assert (1000, (300, 300, 300, 100)) == (sizes.num_rows, sizes.group_rows)
    assert 0.5 * stated < sizes.page_nbytes < stated


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1\0\0\0\0PAR1x", b"PAR1" + b"\xff" * 4 + b"PAR1", b"x" * 100])
def test_other_files_are_no_parquet(data):
    """What does not begin and end as Parquet does is refused."""
    with pytest.raises(ValueError):
        measure_parquet(data)


@pytest.mark.parametrize(
    ("footer", "reason"),
    [
        (b"\x36\x04\x06\x06\x04\0", "field 3 twice"),
        (b"\x1c" * 40 + b"\0" * 41, "nested too deep"),
        (b"\x19\x19" + b"\x09" * 5 + b"\0", "list of lists"),
        (b"\x49\xfc\xff\xff\xff\xff\x07", "cut"),
        (b"\x29\xfc\xff\xff\xff\xff\x07", "more than 2048"),
        (b"\x36" + b"\xff" * 12, "64 bits"),
        (b"\x1d\0", "kind 13"),
        (b"\x18\xff\xff\x03", "cut"),
    ],
)
def test_hostile_footers_are_refused_in_time_that_their_length_bounds(footer, reason):
    """Lying counts, nesting and fields that decoders would read differently are refused."""
    data = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(ValueError, match=reason):
        measure_parquet(data)
