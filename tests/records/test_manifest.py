import dataclasses
import json

import pytest

from anyshard.errors import CheckpointDamaged, LimitExceeded, UnsupportedFormat, UnsupportedValue
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import (
    BlobEntry,
    Manifest,
    PartEntry,
    Resumed,
    StepState,
    Thinned,
    decode_manifest,
    encode_manifest,
)
from anyshard.records.names import blob_name
from tests.records.samples import ATTEMPT, make_manifest

FILE = "manifest-1.json"
DIGEST = "xxh3-128:" + "0" * 32


def sign(text):
    body = (text if isinstance(text, bytes) else text.encode()) + b"\n"
    return body + digest_bytes(body).encode() + b"\n"


def members():
    return json.loads(encode_manifest(make_manifest()).splitlines()[0])


def make_blob(section, rank, k=0):
    return BlobEntry(blob_name(section, rank, k=k, generation=1, attempt=ATTEMPT), section, rank, 8192, 4096, DIGEST)


def make_tombstone():
    return make_manifest(generation=2, state=StepState.DELETED, sections=(), index=None, blobs=(), num_rows=0, num_slots=0)


@pytest.mark.parametrize(
    "manifest",
    [
        make_manifest(),
        make_manifest(step=None, run_id=None, parent=None, mesh={}, user={}, commit="unguarded"),
        make_manifest(
            sections=("a", "\u00e9/~1 \U0001f600"),
            blobs=(
                make_blob("a", 0),
                make_blob("a", 0, 1),
                dataclasses.replace(make_blob("b", 0), section="\u00e9/~1 \U0001f600"),
            ),
        ),
        make_manifest(world_size=4, sections=("z", "a"), blobs=tuple(make_blob(s, r) for s in "za" for r in (0, 1, 3))),
        make_tombstone(),
    ],
)
def test_manifest_comes_back_equal(manifest):
    """Decoding gives what was encoded, in every member."""
    assert manifest == decode_manifest(encode_manifest(manifest), file=f"x/manifest-{manifest.generation}.json")


def test_first_members_lie_within_four_kib_whatever_the_user_stores():
    """A listing that reads 4 KiB sees format to limits, even with the longest ids and much of `user`."""
    manifest = make_manifest(run_id="r" * 1000, writer="w" * 1000, user={"x": "y" * 100_000})
    head = encode_manifest(manifest)[:4096].decode()
    expected = "format version requires state generation attempt run_id step time writer world_size commit limits".split()
    assert expected == [name for name in expected if f'"{name}":' in head]
    assert "user" in encode_manifest(make_manifest())[:2048].decode()


@pytest.mark.parametrize("cut", range(1, 60))
def test_cut_manifest_is_damaged(cut):
    """A record that lost its end is recognised, wherever the cut lies."""
    with pytest.raises(CheckpointDamaged):
        decode_manifest(encode_manifest(make_manifest())[:-cut], file=FILE)


def test_every_flipped_bit_is_found():
    """The digest line covers everything before it, and is itself compared to the letter."""
    data = encode_manifest(make_manifest())
    for position in range(len(data)):
        for bit in range(8):
            flipped = data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
            with pytest.raises(CheckpointDamaged):
                decode_manifest(flipped, file=FILE)


def test_bytes_after_the_digest_line_are_damage():
    """Nothing may follow the digest line."""
    with pytest.raises(CheckpointDamaged, match="last line"):
        decode_manifest(encode_manifest(make_manifest()) + b"\n", file=FILE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "JSON object"),
        ("{", "strict JSON"),
        ('{"a":1,"a":2}', "duplicate"),
        ('{"a":{"b":1,"b":1}}', "duplicate"),
        ('{"a":NaN}', "NaN"),
        ('{"a":-Infinity}', "Infinity"),
        ('{"a":1e999}', "float64"),
        ('{"a":' + "9" * 5000 + "}", "strict JSON"),
        ('{"a":"\\ud800"}', "surrogate"),
        (b'{"a":"\xed\xa0\x80"}', "strict JSON"),
        (b'{"a":"\xff"}', "strict JSON"),
        ('{"a":' + "[" * 40 + "]" * 40 + "}", "nested"),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ("[" + "0," * 1_000_001 + "0]", "nodes"),
    ],
)
def test_loose_json_is_damage(text, reason):
    """Only JSON that every reader understands in one way is taken, within its limits."""
    with pytest.raises(CheckpointDamaged, match=reason):
        decode_manifest(sign(text), file=FILE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "other"),
        ("format", None),
        ("version", True),
        ("version", 0),
        ("version", 1.0),
        ("requires", "codec"),
        ("requires", [1]),
        ("state", "gone"),
        ("generation", 0),
        ("generation", 2),
        ("generation", 1_000_000_000),
        ("attempt", "ABCDEFGH23456"),
        ("step", -1),
        ("step", "100"),
        ("run_id", 7),
        ("run_id", "r" * 2000),
        ("time", "2026-01-02 03:04:05"),
        ("time", "2026-01-02T03:04:05+01:00"),
        ("world_size", 0),
        ("commit", "maybe"),
        ("limits", {"rows": 5}),
        ("limits", {"rows": 1 << 40, "slots": 1}),
        ("parent", {"run_id": None, "step": None, "attempt": "x"}),
        ("mesh", {"dp": 0}),
        ("mesh", [["dp", 1]]),
        ("index", None),
        ("index.name", "../index-1-abcdefgh23456.parquet"),
        ("index.nbytes", -1),
        ("index.digest", "xxh3-128:" + "A" * 32),
        ("bases", None),
        ("sections", ["model", "model"]),
        ("sections", ["other"]),
        ("sections", ["model", "other"]),
        ("step", 1 << 62),
        ("user", []),
        ("blobs", {}),
        ("blobs", [7]),
        ("blobs.0.name", "data/../../etc/passwd"),
        ("blobs.0.name", "data/model/0.0-1-abcdefgh23456.bin\n"),
        ("blobs.0.section", "other"),
        ("blobs.0.rank", 1),
        ("blobs.0.nbytes", 5000),
        ("blobs.0.nbytes", 1 << 62),
        ("blobs.0.tail_position", 63),
        ("blobs.0.tail_position", 1 << 40),
        ("blobs.0.tail_digest", "md5:" + "0" * 32),
    ],
)
def test_wrong_member_is_damage_that_names_the_file(path, value):
    """Every member is checked for type and range, also in a record whose digest line fits."""
    tree = members()
    *parents, name = path.split(".")
    node = tree
    for parent in parents:
        node = node[int(parent) if parent.isdigit() else parent]
    node[name] = value
    with pytest.raises(CheckpointDamaged, match=FILE) as caught:
        decode_manifest(sign(json.dumps(tree)), file=FILE)
    assert FILE == caught.value.file


@pytest.mark.parametrize("name", sorted(members()))
def test_every_member_is_needed(name):
    """A record without one of its members is damaged."""
    tree = members()
    del tree[name]
    with pytest.raises(CheckpointDamaged, match=name):
        decode_manifest(sign(json.dumps(tree)), file=FILE)


def test_unknown_members_are_ignored():
    """A later release of the same version may add members."""
    tree = members() | {"added": {"x": [1, 2]}}
    tree["blobs"][0]["added"] = None
    assert make_manifest() == decode_manifest(sign(json.dumps(tree)), file=FILE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2, "blobs": "elsewhere"}, "version 2.*anyshard 0.*up to version 1"),
        ({"requires": ["encryption:x", "codec:zstd"]}, "encryption:x.*codec:zstd.*release"),
        ({"bases": [{"step": 1}]}, "other checkpoints"),
    ],
)
def test_later_formats_are_refused_by_name(changes, reason):
    """What needs a newer release is told from what is damaged, before other members are looked at."""
    with pytest.raises(UnsupportedFormat, match=reason):
        decode_manifest(sign(json.dumps(members() | changes)), file=FILE)


@pytest.mark.parametrize("order", [("ab", (1, 0)), ("ba", (0, 1))])
def test_blobs_out_of_order_are_damage(order):
    """The order of blobs says which of them is k = 0: it has to be right."""
    names, ranks = order
    manifest = make_manifest(world_size=2, sections=("a", "b"), blobs=tuple(make_blob(s, r) for s in "ab" for r in (0, 1)))
    tree = json.loads(encode_manifest(manifest).splitlines()[0])
    tree["blobs"].sort(key=lambda blob: (names.index(blob["section"]), ranks.index(blob["rank"])))
    with pytest.raises(CheckpointDamaged, match="order"):
        decode_manifest(sign(json.dumps(tree)), file=FILE)


def test_one_blob_named_twice_is_damage():
    """Each blob stands once in the list."""
    tree = members()
    tree["blobs"] *= 2
    with pytest.raises(CheckpointDamaged, match="each name once"):
        decode_manifest(sign(json.dumps(tree)), file=FILE)


@pytest.mark.parametrize(
    ("user", "address"),
    [
        ({"a": float("nan")}, "user/a"),
        ({"a": [1, {"b": float("inf")}]}, "user/a/1/b"),
        ({"a": (1, 2)}, "user/a"),
        ({1: 2}, "user: member name"),
        ({"a": 1 << 70}, "user/a"),
        ({"a": "\ud800"}, "user/a"),
        ({"a": StepState.COMMITTED}, "user/a"),
        ({"a": b"x"}, "user/a"),
    ],
)
def test_user_members_that_json_would_change_are_refused(user, address):
    """Nothing is stored that would come back different; the error says where it is."""
    with pytest.raises(UnsupportedValue) as caught:
        encode_manifest(make_manifest(user=user))
    assert address == caught.value.address


def nest(depth):
    return {} if depth == 1 else {"a": nest(depth - 1)}


def test_user_is_taken_as_deep_as_it_can_be_read():
    """What is attached at the greatest depth comes back; one level more is refused before it is written."""
    manifest = make_manifest(user=nest(31))
    assert manifest == decode_manifest(encode_manifest(manifest), file=FILE)
    with pytest.raises(UnsupportedValue, match="nested"):
        encode_manifest(make_manifest(user=nest(32)))


@pytest.mark.parametrize("name", ["", "x" * 65_537])
def test_section_names_are_neither_empty_nor_too_long(name):
    """A section has a name that blobs can repeat in their tails."""
    with pytest.raises(LimitExceeded, match="names of 1 to"):
        encode_manifest(dataclasses.replace(make_tombstone(), sections=(name,)))


def test_section_without_a_blob_of_rank_0_is_damage():
    """Each section has the blob that holds its shared values."""
    tree = members() | {"world_size": 2}
    for blob in tree["blobs"]:
        blob["rank"] = 1
    with pytest.raises(CheckpointDamaged, match="of rank 0 for section 'model'"):
        decode_manifest(sign(json.dumps(tree)), file=FILE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "r" * 2000},
        {"step": 1 << 62},
        {"user": {"x": [0] * 1_000_001}},
        {"user": {"x": "y" * (64 << 20)}},
    ],
)
def test_too_large_manifest_is_refused_before_it_is_written(changes):
    """What no reader would take is not written."""
    with pytest.raises(LimitExceeded):
        encode_manifest(make_manifest(**changes))


def test_every_field_of_the_record_reaches_the_file():
    """No field of the record is forgotten by the codec."""
    tree = members()
    named = {"num_rows": "limits", "num_slots": "limits"}
    rare = {"parts", "thinned", "resumed"}
    assert rare == {named.get(field.name, field.name) for field in dataclasses.fields(Manifest)} - set(tree)


RESUMED = Resumed(200, "2026-01-03T03:04:05.123Z")
THINNED = Thinned(ATTEMPT, ("optimizer", "extra"), "2026-01-03T03:04:05.123Z")


def make_in_parts(**changes):
    parts = (PartEntry("actor", 1, ATTEMPT), PartEntry("critic", 3, "b" * 13))
    return dataclasses.replace(
        make_tombstone(), **{"state": StepState.COMMITTED, "parts": parts, "requires": ("parts",), **changes}
    )


@pytest.mark.parametrize(
    "manifest",
    [make_manifest(thinned=THINNED), make_manifest(resumed=RESUMED), make_in_parts(), make_in_parts(resumed=RESUMED)],
    ids=["thinned", "resumed", "parts", "resumed parts"],
)
def test_rare_members_come_back_equal(manifest):
    """A thinned checkpoint, one of a job that was resumed, and a step in parts are decoded as they were encoded."""
    assert manifest == decode_manifest(encode_manifest(manifest), file=f"manifest-{manifest.generation}.json")


def test_the_attempt_of_the_data_outlives_thinning():
    """It is the record's own attempt until the checkpoint is thinned."""
    thinned = make_manifest(attempt="c" * 13, thinned=THINNED)
    assert (ATTEMPT, ATTEMPT) == (make_manifest().data_attempt, thinned.data_attempt)


def test_a_step_in_parts_is_refused_by_what_does_not_know_them(monkeypatch):
    """Its record names the feature, so that an older release says what it lacks."""
    monkeypatch.setattr("anyshard.records.manifest.SUPPORTED_REQUIREMENTS", frozenset())
    with pytest.raises(UnsupportedFormat, match="'parts'"):
        decode_manifest(encode_manifest(make_in_parts()), file="manifest-2.json")


RARE_FAULTS = {
    "parts are not required": (make_in_parts(requires=()), "requires"),
    "required without parts": (make_manifest(requires=("parts",)), "requires"),
    "parts beside an index": (make_manifest(parts=make_in_parts().parts, requires=("parts",)), "index"),
    "parts beside a section": (make_in_parts(sections=("model",)), "parts"),
    "parts of a deleted step": (make_in_parts(state=StepState.DELETED), "parts"),
    "a part twice": (make_in_parts(parts=make_in_parts().parts[:1] * 2), "each name once"),
    "a part with a slash": (make_in_parts(parts=(PartEntry("a/b", 1, ATTEMPT),)), "directory"),
    "a part with dots": (make_in_parts(parts=(PartEntry("..", 1, ATTEMPT),)), "directory"),
    "a part of no attempt": (make_in_parts(parts=(PartEntry("a", 1, "A"),)), "attempt"),
    "a part of generation 0": (make_in_parts(parts=(PartEntry("a", 0, ATTEMPT),)), "generation"),
    "a thinned step in parts": (make_in_parts(thinned=THINNED), "thinned"),
    "a thinned tombstone": (dataclasses.replace(make_tombstone(), thinned=THINNED), "thinned"),
    "thinned by no attempt": (make_manifest(thinned=dataclasses.replace(THINNED, attempt="")), "thinned"),
    "thinned at no time": (make_manifest(thinned=dataclasses.replace(THINNED, time="today")), "thinned"),
    "resumed at no time": (make_manifest(resumed=dataclasses.replace(RESUMED, time="today")), "resumed"),
    "resumed from no step": (make_manifest(resumed=dataclasses.replace(RESUMED, step=-1)), "resumed"),
    "nothing is gone": (make_manifest(thinned=dataclasses.replace(THINNED, dropped=())), "dropped"),
    "gone twice": (make_manifest(thinned=dataclasses.replace(THINNED, dropped=("a", "a"))), "dropped"),
    "gone and there": (make_manifest(thinned=dataclasses.replace(THINNED, dropped=("model",))), "dropped"),
    "gone without a name": (make_manifest(thinned=dataclasses.replace(THINNED, dropped=("",))), "dropped"),
}


@pytest.mark.parametrize("case", RARE_FAULTS)
def test_rules_of_rare_members(case):
    """What breaks a rule of parts, of thinning or of resuming is never written."""
    manifest, reason = RARE_FAULTS[case]
    with pytest.raises(LimitExceeded, match=reason):
        encode_manifest(manifest)


@pytest.mark.parametrize(
    ("manifest", "name", "value"),
    [
        (make_in_parts(), "parts", [{"name": "a", "generation": 0, "attempt": ATTEMPT}]),
        (make_in_parts(), "parts", [{"name": "../a", "generation": 1, "attempt": ATTEMPT}]),
        (make_in_parts(), "parts", {}),
        (make_in_parts(), "parts", []),
        (make_manifest(thinned=THINNED), "thinned", None),
        (make_manifest(thinned=THINNED), "thinned", {"attempt": ATTEMPT, "dropped": ["x", 1], "time": THINNED.time}),
        (make_manifest(thinned=THINNED), "thinned", {"attempt": ATTEMPT, "dropped": ["x"]}),
        (make_manifest(resumed=RESUMED), "resumed", None),
        (make_manifest(resumed=RESUMED), "resumed", {"step": True, "time": RESUMED.time}),
        (make_manifest(resumed=RESUMED), "resumed", {"step": 200}),
    ],
)
def test_rare_members_of_another_form_are_damage(manifest, name, value):
    """Each has exactly its type, and its own rules, when it is read too."""
    tree = json.loads(encode_manifest(manifest).splitlines()[0]) | {name: value}
    with pytest.raises(CheckpointDamaged):
        decode_manifest(sign(json.dumps(tree)), file=f"manifest-{manifest.generation}.json")
