import pytest

from anyshard.records.names import (
    FileKind,
    FileName,
    blob_name,
    index_name,
    make_attempt,
    manifest_name,
    parse_name,
)

A = "abcdefgh23456"


def test_every_made_name_parses_to_its_parts():
    """What the makers write, the parser takes apart again."""
    expected = {
        manifest_name(12): FileName(FileKind.MANIFEST, 12, None),
        index_name(3, A): FileName(FileKind.INDEX, 3, A),
        blob_name("model", 70, k=2, generation=999_999_999, attempt=A): FileName(FileKind.BLOB, 999_999_999, A, "model", 70, 2),
        f"manifest-1.json.{A}.tmp": FileName(FileKind.TEMPORARY, 1, A),
        f"{index_name(3, A)}.{A}.tmp": FileName(FileKind.TEMPORARY, 3, A),
    }
    assert expected == {name: parse_name(name) for name in expected}


@pytest.mark.parametrize(
    "name",
    [
        "manifest-0.json",
        "manifest-01.json",
        "manifest-1.json\n",
        "manifest-1234567890.json",
        "Manifest-1.json",
        "manifest-\u0661.json",
        "./manifest-1.json",
        f"index-1-{A}.parquet.tmp",
        f"index-1-{A}.parquet.bcdefgh234567.tmp",
        f"index-1-{A[:-1]}.parquet",
        f"index-1-{A.upper()}.parquet",
        f"data/model/0.0-1-{A}.bin/x",
        f"data/../0.0-1-{A}.bin",
        f"data/.model/0.0-1-{A}.bin",
        f"data/model/00.0-1-{A}.bin",
        f"data/{'m' * 65}/0.0-1-{A}.bin",
        f"/data/model/0.0-1-{A}.bin",
        f"data/0.0-1-{A}.bin",
        "",
    ],
)
def test_other_names_are_foreign(name):
    """Whatever does not match a pattern to the letter is nobody's file."""
    assert parse_name(name) is None


def test_makers_refuse_what_the_parser_would():
    """No name leaves the makers that readers would refuse."""
    with pytest.raises(ValueError, match="valid name"):
        blob_name("../model", 0, k=0, generation=1, attempt=A)
    with pytest.raises(ValueError, match="valid name"):
        manifest_name(0)
    with pytest.raises(ValueError, match="valid name"):
        index_name(1, "short")


def test_attempts_are_valid_and_differ():
    """Attempt ids have the alphabet of names that survive stores that ignore case."""
    attempts = {make_attempt() for _ in range(100)}
    assert 100 == len(attempts)
    assert all(parse_name(index_name(1, attempt)) is not None for attempt in attempts)
