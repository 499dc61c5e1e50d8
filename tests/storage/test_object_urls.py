"""What URLs and storage options say, and what is refused."""

from __future__ import annotations

import functools
import re
import traceback
from typing import Any

import pytest

from anyshard.errors import InvalidOption, InvalidPath
from anyshard.storage.object_store.opening import open_object_store
from anyshard.storage.object_store.places import parse_place
from anyshard.storage.object_store.s3_uploads import _find_keys, _make_boto3
from anyshard.storage.object_store.settings import read_settings
from anyshard.storage.object_store.store import ObjectStore
from anyshard.testing.store_fixtures import keys_below
from tests.servers import S3Server

KEYS = {"access_key_id": "AKIAIOSFODNN7", "secret_access_key": "wJalr/bPx+RfiCYz"}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run/step_1", ("s3", "bucket", "run/step_1")),
        ("s3a://bucket", ("s3", "bucket", "")),
        ("S3://bucket/", ("s3", "bucket", "")),
        ("s3://bucket/run/", ("s3", "bucket", "run")),
        ("gs://my.bucket/run", ("gcs", "my.bucket", "run")),
        ("gcs://bucket/run", ("gcs", "bucket", "run")),
        ("az://container/run", ("azure", "container", "run")),
        ("abfss://container@account.dfs.core.windows.net/run", ("azure", "container", "run")),
        ("s3://bucket/my%20run/a b", ("s3", "bucket", "my run/a b")),
        ("s3://bucket/100%25/a+b/%3F%23", ("s3", "bucket", "100%/a+b/?#")),
        ("s3://bucket/%C3%BC/\u4e16", ("s3", "bucket", "\u00fc/\u4e16")),
    ],
)
def test_places(url: str, expected: tuple[str, str, str]) -> None:
    """Service, bucket and prefix; percent escapes are decoded, a plus sign is one, and what is shown names the same place."""
    place = parse_place(url)
    assert expected == (place.service, place.bucket, place.prefix)
    again = parse_place(place.url)
    assert expected == (again.service, again.bucket, again.prefix)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///run",
        "s3://buck et/run",
        "s3://bucket:80/run",
        "s3://user:word@bucket/run",
        "s3://bucket/a//b",
        "s3://bucket/a/../b",
        "s3://bucket/%2e%2e/b",
        "s3://bucket/a%2F%2Fb",
        "s3://bucket/100%/b",
        "s3://bucket/%FF",
        "s3://bucket/a%00b",
        "s3://bucket/a%0Ab",
        "s3://bucket/a\\b",
        "s3://bucket/a#b",
        "s3://bucket/a?region",
        "s3://bucket/a?region=a&region=b",
        "abfss://container@example.com/run",
    ],
)
def test_bad_urls(url: str) -> None:
    """What names no place is `InvalidPath`, which does not repeat the URL."""
    with pytest.raises(InvalidPath, match="expected") as caught:
        open_object_store(url, KEYS)
    assert url.partition("://")[2] not in str(caught.value) or not url.partition("://")[2]


def test_options_win_over_the_query() -> None:
    """Names in the query are those of the options, which win; both are hidden."""
    url = "s3://bucket/run?region=eu-1&max_attempts=3&secret_access_key=from+the/url&access_key_id=me"
    place = parse_place(url)
    settings = read_settings(place, {"region": "eu-2"})
    assert ("eu-2", 3, "from+the/url") == (
        settings.config["region"],
        settings.policy.max_attempts,
        settings.config["secret_access_key"],
    )
    store = open_object_store(url, {"region": "eu-2"})
    assert store.url == "s3://bucket/run"
    for text in (repr(place), repr(settings), repr(store), store.site, store.url):
        assert not re.search("from|secret|eu-1", text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endpoint": "http://localhost:1"}, True),
        ({"endpoint": "https://localhost:1"}, False),
        ({"endpoint": "https://localhost:1", "allow_http": "true"}, True),
        ({"endpoint": "https://localhost:1", "allow_http": False}, False),
    ],
)
def test_plain_http_where_the_endpoint_says_so(options: dict[str, Any], expected: bool) -> None:
    """`allow_http` follows from the endpoint unless it is given."""
    assert expected == read_settings(parse_place("s3://bucket"), options).client["allow_http"]


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": "http://localhost:1", "allow_http": False},
        {"endpoint": "wJalr/bPx+RfiCYz"},
        {"endpoint": "localhost:9000"},
        {"endpoint": ""},
        {"part_nbytes": "wJalr/bPx+RfiCYz"},
        {"request_timeout_s": "wJalr/bPx+RfiCYz"},
    ],
)
def test_values_that_cannot_be(options: dict[str, Any]) -> None:
    """They are refused at once, and are not repeated: it may be a secret that stands in the wrong place."""
    with pytest.raises(InvalidOption, match="expected") as caught:
        read_settings(parse_place("s3://bucket"), options)
    assert "wJalr" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "name"),
    [
        ("s3://bucket", {"acces_key_id": "a"}, "acces_key_id"),
        ("s3://bucket?zork=1", {}, "zork"),
        ("gs://bucket", {"region": "eu"}, "region"),
        ("az://container", {"account_name": "a", "profile": "p"}, "profile"),
        ("s3://bucket", {"profile": "nobody-has-this"}, "profile"),
        ("s3://bucket", {"max_attempts": 0}, "max_attempts"),
        ("s3://bucket", {"request_timeout_s": "soon"}, "request_timeout_s"),
        ("s3://bucket", {"connect_timeout_s": True}, "connect_timeout_s"),
        ("s3://bucket", {"part_nbytes": 1000}, "part_nbytes"),
        ("s3://bucket", {"streams_per_blob": 2.5}, "streams_per_blob"),
        ("s3://bucket", {"anonymous": "perhaps"}, "anonymous"),
        ("s3://bucket", {"credential_provider": "me"}, "credential_provider"),
        ("s3://bucket", {"region": ["a"]}, "region"),
        ("s3://bucket", {"endpoint": "http://a", "aws_endpoint_url": "http://b"}, "'endpoint' and 'aws_endpoint_url'"),
        ("s3://bucket?aws_region=a&region=b", {}, "'aws_region' and 'region'"),
        ("az://container", {"account_name": "a", "sas": "a=b", "sas_token": "a=b"}, "'sas' and 'sas_token'"),
        ("s3://bucket", {"virtual_hosted_style_request": "perhaps"}, "virtual_hosted_style_request"),
        ("gs://bucket", {"google_skip_signature": "perhaps"}, "google_skip_signature"),
        ("gs://bucket", {"google_service_account": '{"private_key": "p"}'}, "service_account_key"),
        ("gs://bucket", {"service_account": "/nowhere.json"}, "service account"),
    ],
)
def test_bad_options(url: str, options: dict[str, Any], name: str) -> None:
    """An unknown name or a value that cannot be is `InvalidOption` before anything is sent, and names the option."""
    with pytest.raises(InvalidOption, match=name):
        open_object_store(url, {**options} if url.startswith(("gs", "az")) else {**KEYS, **options})


def test_an_unknown_option_lists_the_known_ones() -> None:
    """The message has every name that this service takes."""
    with pytest.raises(InvalidOption, match="access_key_id.*endpoint.*max_attempts.*profile.*unsigned_payload.*found 'zork'"):
        open_object_store("s3://bucket", {**KEYS, "zork": "1"})


async def provide_later() -> dict[str, Any]:
    """Credentials that somebody would have to await."""
    return {}


class LaterProvider:
    """An object that is called and must be awaited, as some of obstore are."""

    async def __call__(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("provider", [provide_later, functools.partial(provide_later), LaterProvider()])
def test_an_async_credential_provider_is_refused(provider: Any) -> None:
    """Nobody here awaits anything, so it is refused before anything is sent."""
    with pytest.raises(InvalidOption, match="credential_provider.*async"):
        open_object_store("s3://bucket", {"region": "r", "credential_provider": provider})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket", {"service_account": "HIDDEN-VALUE"}),
        ("s3://bucket", {"skip_signature": "HIDDEN-VALUE"}),
        ("s3://bucket?imdsv1_fallback=HIDDEN-VALUE", {}),
        ("az://container", {"account_name": "a", "account_key": "HIDDEN-VALUE"}),
    ],
)
def test_no_value_is_shown(url: str, options: dict[str, Any]) -> None:
    """What an option says may be a credential under a wrong name: no error repeats it, nor what stands behind the error."""
    with pytest.raises(InvalidOption) as caught:
        open_object_store(url, options)
    assert "HIDDEN" not in "".join(traceback.format_exception(caught.value))


def test_options_of_obstore_are_passed_on(moto_s3: S3Server) -> None:
    """A name that only obstore knows, of the service or of the client, is taken."""
    options = {**moto_s3.options, "virtual_hosted_style_request": False, "user_agent": "me", "unsigned_payload": "true"}
    store = open_object_store(f"s3://{moto_s3.make_bucket()}/run", options)
    store.create("a", b"", token="t")
    assert keys_below(store, "") == ("a",)


@pytest.mark.parametrize("is_profile", [True, False], ids=["profile", "default"])
def test_keys_from_the_files_of_aws(
    seaweedfs: S3Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_profile: bool
) -> None:
    """Without keys in the options boto3's own places count: a profile that was asked for, or the default one."""
    name = "other" if is_profile else "default"
    keys = "".join(f"aws_{key} = {seaweedfs.options[key]}\n" for key in ("access_key_id", "secret_access_key"))
    (tmp_path / "credentials").write_text(f"[{name}]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    options = {"endpoint": seaweedfs.endpoint, "region": "us-east-1", **({"profile": name} if is_profile else {})}
    store = open_object_store(f"s3://{seaweedfs.make_bucket()}", options)
    store.create("a", b"", token="t")
    assert keys_below(store, "") == ("a",)


def test_the_environment_counts(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoint, region and keys may stand where the tools of AWS look for them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    store = open_object_store(f"s3://{moto_s3.make_bucket()}/run", {})
    store.create("a", b"", token="t")
    assert keys_below(store, "") == ("a",)


def test_a_credential_provider_is_asked(moto_s3: S3Server) -> None:
    """Keys may come from a function."""
    calls: list[None] = []

    def provide() -> dict[str, Any]:
        calls.append(None)
        return {"access_key_id": "testkey", "secret_access_key": "testsecret", "token": None, "expires_at": None}

    options = {"endpoint": moto_s3.endpoint, "region": "us-east-1", "credential_provider": provide}
    store = open_object_store(f"s3://{moto_s3.make_bucket()}", options)
    store.create("a", b"", token="t")
    assert (len(calls) > 0, keys_below(store, "")) == (True, ("a",))


@pytest.mark.parametrize("prefix", ["my%20run", "100%25", "a+b", "%3F", "%23", "\u00fc\u4e16", "a b/..."])
def test_any_prefix_works(moto_s3: S3Server, prefix: str) -> None:
    """Blobs below prefixes of odd letters are written, listed, read and deleted."""
    store = open_object_store(f"s3://{moto_s3.make_bucket()}/{prefix}", moto_s3.options)
    store.create("data/a%20b +?#", b"x", token="t")
    assert (keys_below(store, "data/"), store.read("data/a%20b +?#", max_nbytes=1)) == (("data/a%20b +?#",), b"x")
    store.delete(("data/a%20b +?#",))
    assert keys_below(store, "data/") == ()


def find_site(url: str, **options: Any) -> str:
    """The site of a store opened with these."""
    return open_object_store(url, options).site


def test_sites_tell_buckets_and_endpoints_apart() -> None:
    """Two prefixes of one bucket are on one site, another bucket or endpoint is another site, and no key shows."""
    places = (("s3://b/x", ""), ("s3://b/y", ""), ("s3://c/x", ""), ("s3://b/x", "http://me:word@host:1"))
    sites = [find_site(url, **KEYS, **({"endpoint": end} if end else {})) for url, end in places]
    assert (sites[0] == sites[1], len(set(sites)), "word" in "".join(sites)) == (True, 3, False)


@pytest.mark.parametrize("name", ["endpoint", "endpoint_url", "aws_endpoint", "AWS_ENDPOINT_URL", "aws_endpoint_url_s3"])
def test_every_name_of_an_endpoint_counts(name: str) -> None:
    """Whatever the endpoint is called, two servers are two sites, and boto3 talks to the same server as obstore."""
    stores = [open_object_store("s3://b/x", {name: f"http://host:{port}", **KEYS, "region": "r"}) for port in (1, 2)]
    assert ["s3:host:1/b", "s3:host:2/b"] == [store.site for store in stores]
    for port, store in enumerate(stores, start=1):
        assert isinstance(store, ObjectStore)
        assert _make_boto3(store.client).meta.endpoint_url == f"http://host:{port}"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An endpoint that obstore finds in the environment makes the site; one that the options name wins over it."""
    monkeypatch.setenv(name, "http://there:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "there-1")
    store = open_object_store("s3://b/x", KEYS)
    assert isinstance(store, ObjectStore)
    meta = _make_boto3(store.client).meta
    assert ("s3:there:1/b", "http://there:1", "there-1") == (store.site, meta.endpoint_url, meta.region_name)
    assert find_site("s3://b/x", **KEYS, endpoint="http://here:1") == "s3:here:1/b"


def test_an_endpoint_of_the_options_is_really_asked(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go where the options say, whatever the environment names."""
    bucket = moto_s3.make_bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = open_object_store(f"s3://{bucket}/run", moto_s3.options)
    store.create("a", b"", token="t")
    assert keys_below(store, "") == ("a",)


def test_sites_of_azure_and_google(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts and endpoints of Azure, from options and environment, and endpoints of Google Cloud Storage are told apart."""
    sites = [
        find_site("az://c/x", account_name="one", sas="a=b"),
        find_site("az://c/x", azure_storage_account_name="two", azure_storage_access_key="aaaa"),
        find_site("az://c/x", account_name="one", anonymous="true", azure_endpoint="http://host:1"),
        find_site("gs://c/x", anonymous=True),
        find_site("gs://c/x", anonymous=True, google_base_url="http://host:1"),
    ]
    assert ["azure:one.blob.core.windows.net/c", "azure:two.blob.core.windows.net/c", "azure:host:1/c"] == sites[:3]
    assert ["gcs:/c", "gcs:host:1/c"] == sites[3:]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "three")
    assert find_site("az://c/x", anonymous=True) == "azure:three.blob.core.windows.net/c"


def test_flags_may_be_text() -> None:
    """The words of a query for true and false are what they say, and boto3 is told the same."""
    url = "s3://b/x?aws_skip_signature=no&virtual_hosted_style_request=false&endpoint=http://h:1&region=r"
    settings = read_settings(parse_place(url), {})
    assert (False, False) == (settings.is_anonymous, settings.config["virtual_hosted_style_request"])
    store = open_object_store(url, {"aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_session_token": "t"})
    assert isinstance(store, ObjectStore)
    assert store.client.settings.has_keys
    assert ["k", "s", "t"] == list(_find_keys(store.client.settings).values())
    assert _make_boto3(store.client).meta.config.s3 == {"addressing_style": "path"}


def test_boto3_uses_virtual_hosts_where_obstore_does() -> None:
    """obstore wants the bucket in the endpoint then, boto3 puts it there by itself."""
    store = open_object_store("s3://b/x", {**KEYS, "endpoint": "http://b.h:1", "virtual_hosted_style_request": "true"})
    assert isinstance(store, ObjectStore)
    meta = _make_boto3(store.client).meta
    assert ("http://h:1", {"addressing_style": "virtual"}) == (meta.endpoint_url, meta.config.s3)
