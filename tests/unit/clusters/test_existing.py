import json
import warnings

import fiddle as fdl
import pytest
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from nemo_run_ray import ExistingCluster, RayExecutor
from nemo_run_ray.clusters import from_record
from nemo_run_ray.errors import ConfigError

pytestmark = pytest.mark.usefixtures("user_home")

URL, SAFE = "http://ray-head:8265", "https://ray-head:8265"


def _sent(**fields: object) -> str | None:
    return ExistingCluster(url=SAFE, **fields).connect().headers.get("Authorization")


def test_a_token_is_looked_for_where_ray_looks(user_home, tmp_path, monkeypatch):
    assert _sent() is None
    (user_home / ".ray").mkdir()
    (user_home / ".ray" / "auth_token").write_text("of-home\n")
    assert _sent() == "Bearer of-home"
    (tmp_path / "a token").write_text("  of-path\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "a token"))
    assert _sent() == "Bearer of-path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", " of-env\n")
    assert _sent() == "Bearer of-env"
    assert _sent(token="of-argument") == "Bearer of-argument"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/token")
    with pytest.raises(ConfigError, match="/no/such/token"):
        _sent()


def test_a_token_that_was_given_for_another_cluster_is_not_sent(monkeypatch):
    """In a process that finds the cluster in a ledger, with its token's fingerprint alone."""
    record = ExistingCluster(SAFE, token="of-this-one").record()
    monkeypatch.setattr("nemo_run_ray.clusters.existing._TOKENS", {})
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another")
    dashboard = from_record(record).connect()
    assert dashboard.headers == {}
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-this-one")
    assert from_record(record).connect().headers == {"Authorization": "Bearer of-this-one"}


def test_what_goes_to_another_host_in_clear_is_warned_of_once():
    for url in (SAFE, "http://127.0.0.1:8265", "http://localhost:1"):
        ExistingCluster(url, token="t").connect()
    ExistingCluster(URL, headers={"X-Team": "a"}).connect()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")  # as Python has it
        for _ in range(2):
            ExistingCluster(URL, token="t").connect()
    (warning,) = shown
    assert str(warning.message).startswith("Authorization goes to http://ray-head:8265 without")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"),
        ({"token": "t"}, "the token= of your program"),
        ({"headers": {"Authorization": "Bearer ${THEIRS}"}}, "the variable THEIRS"),
    ],
)
def test_where_a_user_finds_the_token(monkeypatch, fields, place):
    monkeypatch.setenv("THEIRS", "t")
    assert ExistingCluster(SAFE, **fields).connect().token_at == place


@pytest.mark.parametrize(
    "name", ["Authorization", "proxy-authorization", "Cookie", "X-Api-Key", "X-Other"]
)
def test_credentials_in_clear_are_refused_and_not_repeated(name):
    with pytest.raises(ConfigError, match="NAME_OF_IT") as caught:
        ExistingCluster(URL, headers={name: "Bearer very-secret"})
    assert "very-secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["a\nb", "a b", "größe", "", 5])
def test_a_token_that_cannot_be_one_is_refused_and_not_repeated(token):
    with pytest.raises(ConfigError, match="token") as caught:
        ExistingCluster(URL, token=token)
    assert repr(token) not in str(caught.value)


def test_the_token_is_shown_and_saved_nowhere():
    secret = "very-secret-token"
    cluster = ExistingCluster(url=SAFE, token=secret)
    executor = RayExecutor(cluster=cluster)
    config = executor.to_config()
    seen = [
        repr(cluster),
        repr(executor),
        repr(cluster.connect()),
        json.dumps(cluster.record()),
        repr(config),
        YamlSerializer().serialize(config),
        str(ZlibJSONSerializer().serialize(config)),
        repr(vars(cluster)),
    ]
    assert not [one for one in seen if secret in one]
    assert fdl.build(config).cluster.connect().headers["Authorization"] == f"Bearer {secret}"
    assert from_record(cluster.record()).connect() == cluster.connect()


def test_headers_take_variables(monkeypatch):
    monkeypatch.setenv("PROXY_KEY", "k$1")
    headers = {"X-Key": "a-${PROXY_KEY}-b", "X-Plain": "$PROXY_KEY {x}"}
    cluster = ExistingCluster(url=SAFE, headers=headers)
    assert cluster.connect().headers == {"X-Key": "a-k$1-b", "X-Plain": "$PROXY_KEY {x}"}
    assert cluster.record()["headers"] == headers
    assert "k$1" not in repr(cluster)
    monkeypatch.delenv("PROXY_KEY")
    with pytest.raises(ConfigError, match=r"'X-Key'.*PROXY_KEY"):
        cluster.connect()


@pytest.mark.parametrize(("name", "value"), [("X-Key", "schlüssel"), ("X-Key", "a\nb")])
def test_a_header_that_cannot_be_sent_is_refused_and_its_value_not_repeated(
    monkeypatch, name, value
):
    monkeypatch.setenv("PROXY_KEY", value.replace("\0", "\x01"))
    with pytest.raises(ConfigError, match="does not allow") as caught:
        ExistingCluster(url=URL, headers={name: value})
    assert value not in str(caught.value) or len(value) < 2
    with pytest.raises(ConfigError, match="does not allow"):
        ExistingCluster(url=URL, headers={name: "${PROXY_KEY}"}).connect()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (URL, URL),
        (f"{URL}/", URL),
        (f"  {URL}\n", URL),
        ("https://host/team-a/ray/", "https://host/team-a/ray"),
    ],
)
def test_addresses(given, url):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dashboard = ExistingCluster(url=given).connect()
    assert dashboard.url == url
    assert dashboard.job_page("exp.job") == f"{url}/#/jobs/exp.job"


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "host",
        "ftp://host",
        "http://:8265",
        "http://host:port",
        "host:99999",
        "http://host:0",
        "http://[::1",
        "http://ho st:8265",
        "http://host:8265/a\0b",
        "ray://",
        None,
    ],
)
def test_what_is_no_address(address):
    with pytest.raises(ConfigError, match="address") as caught:
        ExistingCluster(url=address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("ray://head:10001", "http://head:8265"),
        ("ray://[::1]:10001", "http://[::1]:8265"),
        ("head:6379", "http://head:8265"),
    ],
)
def test_another_address_of_ray_is_translated_with_a_warning(given, url):
    with pytest.warns(UserWarning, match="dashboard"):
        cluster = ExistingCluster(url=given)
    assert cluster.url == url


def test_another_port_is_the_dashboards():
    assert ExistingCluster(url="head:30501").url == "http://head:30501"


@pytest.mark.filterwarnings("ignore:ray.*is an address of another part of Ray")
@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8265"),
        ({"RAY_ADDRESS": "a:26379"}, "http://a:8265"),
        ({"RAY_ADDRESS": "http://a:1", "RAY_API_SERVER_ADDRESS": "http://b:2"}, "http://b:2"),
    ],
)
def test_the_address_of_the_environment(monkeypatch, variables, url):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster = ExistingCluster(url="auto")
    assert cluster.url == url
    assert cluster.record()["url"] == url, "another process has another environment"


def test_a_password_in_the_address_is_refused_without_repeating_it():
    """The address is saved with the experiment and printed."""
    with pytest.raises(ConfigError, match="headers") as caught:
        ExistingCluster(url="https://me:pass-word@host/ray")
    assert "pass-word" not in str(caught.value)


def test_a_ca_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"verify.*no file.*ca\.pem"):
        ExistingCluster(url=URL, verify=str(tmp_path / "ca.pem"))
