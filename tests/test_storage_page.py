"""docs/storage.md and docs/copy.md: their examples run, and the options that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anyshard import ops
from anyshard.errors import InvalidOption
from anyshard.storage.resolve import open_store
from tests.servers import S3Server

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "storage.md").read_text(encoding="ascii")


def find_code(text: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    return str(code)


def test_the_example_runs(moto_s3: S3Server) -> None:
    """The example, as it stands but for the server and the bucket, saves, loads, reads and deletes."""
    code = (
        find_code(TEXT)
        .replace("http://127.0.0.1:5000", moto_s3.endpoint)
        .replace("s3://bucket/", f"s3://{moto_s3.make_bucket()}/")
    )
    found: dict[str, object] = {}
    exec(compile(code, "storage.md", "exec"), found)
    assert (4, 8) == getattr(found["weight"], "shape", None)


def test_the_example_of_copies_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/copy.md, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(compile(find_code((DOCS / "copy.md").read_text(encoding="ascii")), "copy.md", "exec"), found)
    assert isinstance(found["report"], ops.CopyReport)


def test_options_of_the_table_are_known() -> None:
    """Each name in the table of options is one that object stores take, if its value is good."""
    table = TEXT.partition("## Options of object stores")[2].partition("Whatever else")[0]
    names = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)))
    assert {"endpoint", "profile", "account_key", "service_account", "max_attempts", "unsigned_payload"} < set(names)
    known = ""
    for url in ("s3://bucket/a", "gs://bucket/a", "az://container/a"):
        with pytest.raises(InvalidOption) as caught:
            open_store(url, storage_options={"no_such_option": "1"})
        known += str(caught.value)
    assert set() == {name for name in names if name not in known}
