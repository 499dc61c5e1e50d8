import numpy as np
import pytest
import xxhash

from anyshard.errors import CheckpointDamaged
from anyshard.records.digests import cell_digests, check_digest, digest_bytes, is_digest


def test_digest_is_the_published_value_of_xxh3():
    """The written form is the algorithm's name and its canonical hex, as published for the empty input."""
    assert "xxh3-128:99aa06d3014798d86001c324468d497f" == digest_bytes(b"")


@pytest.mark.parametrize("text", ["", "99" * 16, "xxh3-128:" + "A" * 32, "xxh3-128:" + "a" * 31, "xxh3-64:" + "a" * 32])
def test_only_the_exact_form_is_a_digest(text):
    """Upper case, other lengths and other algorithms are no digest that this release compares."""
    assert not is_digest(text)
    assert is_digest("xxh3-128:" + "a" * 32)


def test_difference_names_file_and_both_digests():
    """A digest that does not fit is damage of the named file."""
    with pytest.raises(CheckpointDamaged, match=f"{digest_bytes(b'a')}.*{digest_bytes(b'b')}") as caught:
        check_digest(b"b", digest_bytes(b"a"), file="index")
    assert "index" == caught.value.file
    check_digest(b"a", digest_bytes(b"a"), file="index")


def test_cells_cover_all_bytes_and_the_last_may_be_short():
    """Each cell has the xxh3-64 of its own bytes, from any buffer."""
    data = np.arange(1000, dtype=np.uint16)
    raw = data.tobytes()
    expected = [xxhash.xxh3_64_intdigest(raw[start : start + 768]) for start in (0, 768, 1536)]
    assert expected == cell_digests(memoryview(data), 768).tolist() == cell_digests(bytearray(raw), 768).tolist()
    assert [] == cell_digests(b"", 768).tolist()
