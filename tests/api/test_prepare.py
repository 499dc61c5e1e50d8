"""The rehearsal of one process: what it finds before the first save does, what it reports, and that it leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import anyshard
from anyshard.commit.guard import UNGUARDED
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Capabilities, Store
from anyshard.storage.wrappers import (
    Action,
    CountingStore,
    FaultStore,
    Rule,
    Verb,
    WrapperStore,
    answer,
    do_before,
    fail,
    flip_bit,
)

State = dict[str, Any]


def make_training() -> State:
    """A model with its optimizer after a step, and some values."""
    model = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 3, "rng": anyshard.RNGState()}


def make_plain() -> State:
    return {"model": {"w": torch.ones(4, 4), "b": torch.ones(3)}, "step": 3}


def files_in(place: Path) -> list[str]:
    return [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() or path.name == "data"]


# What cannot be saved -------------------------------------------------------------------------------------------------


def make_freed() -> State:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return {"model": {"w": tensor}}


def make_nested() -> State:
    value: object = 1
    for _ in range(200):
        value = [value]
    return {"extra": {"deep": value}}


def make_nameless() -> State:
    return {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3))])}


def make_twice() -> State:
    model = nn.Linear(3, 3)
    return {"model": model, "optimizer": [torch.optim.SGD(model.parameters()) for _ in range(2)]}


def make_own_module() -> State:
    return {"model": anyshard.PerRank(nn.Linear(2, 2))}


# What is wrong with an app state, and the error with what it names.
BAD_STATES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "function": (lambda: {"extra": {"f": make_plain}}, anyshard.UnsupportedValue, "extra/f"),
    "meta tensor": (lambda: {"model": {"w": torch.ones(2, device="meta")}}, anyshard.InvalidAppState, "model/w: .*to_empty"),
    "sparse tensor": (lambda: {"model": {"w": torch.eye(3).to_sparse()}}, anyshard.UnsupportedValue, "model/w: .*sparse"),
    "freed storage": (make_freed, anyshard.InvalidAppState, "model/w: .*freed"),
    "nested too deep": (make_nested, anyshard.LimitExceeded, "extra/deep"),
    "parameter without a name": (make_nameless, anyshard.InvalidAppState, "optimizer: "),
    "two optimizers, one name": (make_twice, anyshard.InvalidAppState, "optimizer: .*weight"),
    "module per rank": (make_own_module, anyshard.InvalidAppState, "model: .*Linear"),
    "no mapping": (lambda: [1], anyshard.InvalidAppState, "found list"),
    "no name": (lambda: {"": 1}, anyshard.InvalidAppState, "top-level names"),
    "long name": (lambda: {"a" * 1025: 1}, anyshard.InvalidAppState, "at most 1024 characters"),
}


@pytest.mark.parametrize("what", BAD_STATES)
def test_app_states_that_cannot_be_saved(tmp_path: Path, what: str) -> None:
    """They are refused as by a save, before anything is made on the storage."""
    make, kind, message = BAD_STATES[what]
    state = make()
    with pytest.raises(kind, match=message):
        anyshard.prepare(tmp_path / "a", state)
    assert [] == list(tmp_path.iterdir())


def test_names_that_would_share_a_directory(tmp_path: Path) -> None:
    """Sections whose directories clash are refused by their names."""
    with (
        patch("anyshard.records.addresses.xxhash.xxh3_64_hexdigest", lambda _: "0" * 16),
        pytest.raises(anyshard.InvalidAppState, match="'A' and 'a ?' would share a directory|'A ' and 'a ' would share"),
    ):
        anyshard.prepare(tmp_path / "a", {"A ": 1, "a ": 2})
    assert [] == list(tmp_path.iterdir())


# What is asked for ----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Callable[[], State], type[Exception], str]] = {
    "user": (lambda: {"options": anyshard.SaveOptions(user={"x": {1, 2}})}, anyshard.UnsupportedValue, "user/x: .*found set"),
    "other options": (lambda: {"options": anyshard.LoadOptions()}, anyshard.InvalidOption, "options: expected SaveOptions"),
    "num_steps": (lambda: {"num_steps": 0}, anyshard.InvalidOption, "num_steps: .*found 0"),
    "step_s": (lambda: {"step_s": -1.0}, anyshard.InvalidOption, "step_s: .*found -1.0"),
    "also": (lambda: {"also": ["fsdp"]}, anyshard.InvalidOption, "also: expected a list of anyshard.Layout"),
    "axis": (lambda: {"also": [anyshard.Layout({"fsdp": 2}, {"**": {"tp": 0}})]}, anyshard.InvalidOption, "found 'tp'"),
    "dim": (
        lambda: {"also": [anyshard.Layout({"tp": 2}, {"**": {"tp": 1}})]},
        anyshard.InvalidOption,
        r"layout tp=2: model/b: expected a dim of shape \(3,\)",
    ),
    "group": (lambda: {"group": [0, 1]}, anyshard.InvalidOption, "group: expected None outside torch.distributed"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_what_cannot_be_asked(tmp_path: Path, what: str) -> None:
    """Options, metadata and layouts are checked too, before anything is made on the storage."""
    make, kind, message = OPTIONS[what]
    with pytest.raises(kind, match=message):
        anyshard.prepare(tmp_path / "a", make_plain(), **make())
    assert [] == list(tmp_path.iterdir())


def test_a_job_that_is_not_initialised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun without init_process_group each rank would save by itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(anyshard.InvalidOption, match="call init_process_group first"):
        anyshard.prepare(tmp_path / "a", make_plain())


# Places and stores ----------------------------------------------------------------------------------------------------


def make_file(place: Path) -> Path:
    place.mkdir()
    (place / "a").write_text("mine")
    return place / "a"


def make_foreign(place: Path) -> Path:
    (place / "step_5").mkdir(parents=True)
    (place / "step_5" / "model.safetensors").write_text("mine")
    return place / "step_5"


PLACES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "file": (make_file, anyshard.InvalidPath, "expected a directory at"),
    "below a file": (lambda place: make_file(place) / "b", anyshard.InvalidPath, "expected a directory at"),
    "foreign": (make_foreign, anyshard.NotACheckpoint, "found 'model.safetensors'; it looks like a safetensors"),
    "scheme": (lambda _: "s4://bucket/a", anyshard.InvalidPath, "unknown scheme 's4'"),
    "long name": (lambda place: place / ("n" * 300), anyshard.StorageError, "takes no name of this length"),
    "not writable": (lambda _: "/sys/anyshard", anyshard.StorageError, "could not make the directories of /sys/anyshard"),
}


@pytest.mark.parametrize("what", PLACES)
def test_places_that_cannot_be_saved_to(tmp_path: Path, what: str) -> None:
    """They are refused as by a save, and what was there is there."""
    make, kind, message = PLACES[what]
    place = make(tmp_path / "runs")
    before = files_in(tmp_path)
    with pytest.raises(kind, match=message):
        anyshard.prepare(place, make_plain())
    assert before == files_in(tmp_path)


def deny(kind: type[anyshard.StorageError], code: int) -> Action:
    return fail(kind(f"could not: {os.strerror(code)}", file="data/", errno=code))


# What a store does wrong, and what the error says of it.
STORES: dict[str, tuple[Rule, type[Exception], str]] = {
    "denied": (Rule(Verb.PREPARE, "*", deny(anyshard.StorageDenied, errno.EACCES)), anyshard.StorageDenied, "Permission denied"),
    "read-only": (Rule(Verb.CREATE, "*", deny(anyshard.StorageDenied, errno.EROFS)), anyshard.StorageDenied, "Read-only"),
    "full": (Rule(Verb.CREATE_BLOB, "*", deny(anyshard.StorageFull, errno.ENOSPC)), anyshard.StorageFull, "No space left"),
    "fails late": (Rule(Verb.FINISH, "*", deny(anyshard.StorageError, errno.EIO)), anyshard.StorageError, "Input/output"),
    "no conditions": (Rule(Verb.CREATE, "*", answer(None), nth=2), anyshard.StorageError, "create-if-absent"),
    "loses bits": (Rule(Verb.READ_INTO, "*", flip_bit(7), nth=3), anyshard.StorageError, "0.0-1-probe.*loses or changes writes"),
    "no delete": (Rule(Verb.DELETE, "index*", answer(None)), anyshard.StorageError, "gone after it was deleted"),
}


def test_a_store_that_hangs(tmp_path: Path) -> None:
    """The rehearsal ends in time, names the call that has no answer, and asks for nothing more."""
    answered = threading.Event()
    store = CountingStore(FaultStore(LocalStore(tmp_path), [Rule(Verb.WRITE_AT, "*", do_before(partial(answered.wait, 30)))]))
    try:
        with pytest.raises(anyshard.StorageStuck, match="waiting for: write data/anyshard-probe/0.0-1-probe"):
            anyshard.prepare(store, make_plain(), options=anyshard.SaveOptions(timeout_s=0.5))
        assert 0 == store.count(Verb.DELETE).calls
    finally:
        answered.set()


@pytest.mark.parametrize("what", STORES)
def test_stores_that_cannot_be_trusted(tmp_path: Path, what: str) -> None:
    """Each fault is met by the trial of the store, told as what it is, and nothing is left that the store lets delete."""
    rule, kind, message = STORES[what]
    store = FaultStore(LocalStore(tmp_path / "a"), [rule])
    with pytest.raises(kind, match=message):
        anyshard.prepare(store, make_plain())
    assert 1 == len(store.fired)
    assert (1 if what == "no delete" else 0) == len(files_in(tmp_path))


ROOM = (1 << 20) + 60_000  # a save wants 1 MiB for records


@pytest.mark.parametrize(("num_steps", "is_room"), [(1, True), (3, False)])
def test_room_for_some_checkpoints(num_steps: int, is_room: bool) -> None:
    """The error says how much is needed for how many, and how much is free."""
    store = MemoryStore()
    with patch.object(store, "free_nbytes", lambda: ROOM):
        if is_room:
            assert ROOM == anyshard.prepare(store, make_plain(), num_steps=num_steps).free_nbytes
            return
        with pytest.raises(anyshard.StorageFull, match=f"found {ROOM} free; .*for num_steps=3 checkpoints of"):
            anyshard.prepare(store, make_plain(), num_steps=num_steps)


class Unguarded(WrapperStore):
    """A store that says itself that it may replace keys."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(parallel_writes=True, guarded=False)


def test_warnings(tmp_path: Path) -> None:
    """What is no error but worth a look: a checkpoint at the place, a store without conditions, a rule for nothing."""
    anyshard.save(tmp_path / "step_1", make_plain())
    layout = anyshard.Layout({"tp": 2}, {"layers/**": {"tp": 0}})
    report = anyshard.prepare(Unguarded(LocalStore(tmp_path / "step_1")), make_plain(), also=[layout])
    assert [
        f"{tmp_path}/step_1: a checkpoint is there (step 1): a save to this very place needs overwrite=True",
        "also: layout tp=2: 'layers/**' matches no tensor",
        UNGUARDED,
    ] == list(report.warnings)
    assert 1.0 == anyshard.open(tmp_path / "step_1")["model/w"][0, 0]


# What a rehearsal gives -----------------------------------------------------------------------------------------------


def snapshot(state: State) -> list[bytes]:
    values = [*state["model"].state_dict().values(), *(t for of in state["optimizer"].state.values() for t in of.values())]
    return [*(value.numpy().tobytes() for value in values), torch.get_rng_state().numpy().tobytes()]


def test_the_first_save_after_a_rehearsal(tmp_path: Path) -> None:
    """It has a plan already and finds nothing wrong; the rehearsal has changed nothing, in memory and on the storage."""
    state = make_training()
    before = snapshot(state)
    report = anyshard.prepare(tmp_path / "runs/a", state, num_steps=3)
    assert ([], before) == (files_in(tmp_path), snapshot(state))
    saved = anyshard.save(tmp_path / "runs/a/step_1", state)
    assert (True, report.num_tensors, report.nbytes) == (saved.plan_was_cached, saved.num_tensors, saved.nbytes)
    written = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert report.num_files == len(written)
    assert sum(written) <= report.needed_nbytes / 3 + (1 << 20)


def test_a_failed_rehearsal_leaves_no_plan(tmp_path: Path) -> None:
    """The save after it plans afresh."""
    store = FaultStore(LocalStore(tmp_path / "a"), [STORES["loses bits"][0]])
    state = {"after a failure": make_plain()}
    with pytest.raises(anyshard.StorageError):
        anyshard.prepare(store, state)
    assert not anyshard.save(tmp_path / "b", state).plan_was_cached


def test_today_is_forecast_to_the_byte(tmp_path: Path) -> None:
    """What a load reads is what the rehearsal has said."""
    state = make_training()
    report = anyshard.prepare(tmp_path, state)
    anyshard.save(tmp_path / "step_1", state)
    loaded = anyshard.load(tmp_path / "step_1", state)
    (today,) = report.loads
    assert ("today", 1, loaded.nbytes, loaded.read_nbytes) == (
        today.layout,
        today.num_ranks,
        today.wanted_nbytes,
        today.read_nbytes,
    )


def test_what_is_lazy_and_why_not(tmp_path: Path) -> None:
    """Under lazy staging the report says how much is copied at the call and why, and warns of optimizers that cannot wait."""
    state, unhooked = make_training(), make_training()
    del unhooked["optimizer"]._optimizer_step_pre_hooks
    options = anyshard.SaveOptions(staging="lazy")
    lazy, eager = (anyshard.prepare(tmp_path, each, options=options) for each in (state, unhooked))
    assert (3 * 128 * 96 * 4, 0) == (lazy.staging.lazy_nbytes, eager.staging.lazy_nbytes)
    assert ("smaller than 16 KiB",) == tuple(lazy.staging.eager)
    warning = "staging='lazy': copied at the call is all of AdamW, an optimizer whose steps run no hooks"
    assert ((), (warning,)) == (lazy.warnings, eager.warnings)


class Growing:
    """Has one more tensor each time that it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.num_asked += 1
        return {str(i): torch.ones(1) for i in range(self.num_asked)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise AssertionError(state)


def test_a_structure_that_never_stays(tmp_path: Path) -> None:
    """What gives another structure each time is warned of, for its saves never have a plan."""
    (warning,) = anyshard.prepare(tmp_path, {"loader": Growing()}).warnings
    assert "the app state gave two structures" in warning


def test_the_report_is_a_page_and_a_dictionary(tmp_path: Path) -> None:
    """It is printed on a page, however much there is to say, and JSON can hold it."""
    layouts = [
        anyshard.Layout({"fsdp": size}, {"**": {"fsdp": 0}, **{f"no/{i}": {} for i in range(20)}}) for size in range(1, 20)
    ]
    options = anyshard.SaveOptions(staging="lazy", max_in_flight=2)
    report = anyshard.prepare(tmp_path, make_training(), also=layouts, step_s=1e-6, options=options)
    lines = str(report).splitlines()
    assert f"rehearsal of saves to {tmp_path}: no fault found" == lines[0]
    assert len(lines) <= 40
    held = json.loads(json.dumps(report.as_dict()))
    assert (20, report.nbytes, report.staging.arena_nbytes) == (
        len(held["loads"]),
        held["nbytes"],
        held["staging"]["arena_nbytes"],
    )
    assert 1.0 <= held["loads"][0]["read_amplification"] <= held["loads"][-1]["read_amplification"]
    assert report.num_steps_between is not None
    assert report.num_steps_between > 1
    assert 0 < report.stall_s < report.duration_s


def test_arenas_are_there_for_the_first_save(tmp_path: Path) -> None:
    """An asynchronous save after a rehearsal takes an arena that it has faulted in."""
    state = make_training()
    report = anyshard.prepare(tmp_path, state)
    pending = anyshard.async_save(tmp_path / "step_1", state)
    assert pending.result(timeout_s=60).plan_was_cached
    assert report.staging.arena_nbytes == pending.staging.arena_nbytes


def test_events_of_a_rehearsal(tmp_path: Path) -> None:
    """It is a span of its own with its phases in it."""
    names: list[str] = []

    class Names:
        def emit(self, event: anyshard.Event) -> None:
            names.append(event.name)

    anyshard.prepare(tmp_path, make_plain(), sinks=[Names()])
    spans = [name.removesuffix(".begin") for name in names if name.startswith("prepare") and name.endswith(".begin")]
    phases = ["adapt", "plan", "begin", "compare", "storage", "measure"]
    assert ["prepare", *(f"prepare.{phase}" for phase in phases)] == [span for span in spans if span != "prepare.done"]


def test_a_store_may_be_given(tmp_path: Path) -> None:
    """Any `Store` is rehearsed on like a path, and holds nothing afterwards."""
    store: Store = MemoryStore(url="memory:runs")
    assert "memory:runs" == anyshard.prepare(store, make_plain()).url
    assert ((), ()) == (store.list("").entries, store.list("").prefixes)


def test_a_rehearsal_leaves_no_trace_in_later_files(tmp_path: Path) -> None:
    """Between two saves of the same state, the files of the second are those of the first: the gaps of its memory are zeros."""
    state = {"x": {name: torch.ones(100 + number) for number, name in enumerate("abc")}}
    found = []
    for step in (1, 2):
        anyshard.prepare(tmp_path, state)
        anyshard.async_save(tmp_path / f"step_{step}", state).result()
        (blob,) = (tmp_path / f"step_{step}/data").rglob("*.bin")
        found.append(blob.read_bytes()[64:1400])
    assert found[0] == found[1]
    assert b"\0" * 48 == found[0][400:448]
