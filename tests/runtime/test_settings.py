"""Promises of the settings blocks and their loader."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dualmap.runtime.settings import SERVICE_KEYS, Block, CommaList, ServiceSettings, is_loopback, mask_password
from dualmap.runtime.settings_loader import load_settings


class _AgentBlock(Block):
    routers: CommaList = ()


class _Settings(ServiceSettings):
    agent: _AgentBlock = _AgentBlock()


def _refused(capsys: pytest.CaptureFixture[str], argv: list[str] | None = None) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        load_settings(_Settings, argv or [])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_defaults_serve_loopback_only() -> None:
    """Nothing said, nothing open."""
    settings = load_settings(_Settings, [])

    assert settings.server.host == "127.0.0.1"
    assert settings.metrics_host == "127.0.0.1"
    assert settings.redis.socket_timeout_s == 0.3
    assert settings.pool.ttft_slo_ms == 5000


def test_a_variable_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the deployment's, the variable this process's; blocks merge field by field."""
    file = tmp_path / "dualmap.yaml"
    file.write_text("server: {port: 7000, drain_grace_s: 1}\npool: {models: [a, b]}\n")
    monkeypatch.setenv("DUALMAP_SERVER__PORT", "7001")
    monkeypatch.setenv("DUALMAP_CONFIG", str(file))

    settings = load_settings(_Settings, [])

    assert (settings.server.port, settings.server.drain_grace_s) == (7001, 1)
    assert settings.pool.models == ("a", "b")


def test_a_list_in_a_variable_is_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a block."""
    monkeypatch.setenv("DUALMAP_AGENT__ROUTERS", "127.0.0.1:1, 127.0.0.1:2")
    monkeypatch.setenv("DUALMAP_POOL__MODELS", "one")

    settings = load_settings(_Settings, [])

    assert settings.agent.routers == ("127.0.0.1:1", "127.0.0.1:2")
    assert settings.pool.models == ("one",)


def test_the_short_name_of_the_redis_url_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before the file, and the exact name before it; other fields of the block stay."""
    file = tmp_path / "dualmap.yaml"
    file.write_text("redis: {url: 'redis://file:1', retries: 0}\n")
    monkeypatch.setenv("DUALMAP_REDIS_URL", "redis://short:2")

    redis = load_settings(_Settings, ["--config", str(file)]).redis
    assert (redis.url, redis.retries) == ("redis://short:2", 0)

    monkeypatch.setenv("DUALMAP_REDIS__URL", "redis://exact:3")
    assert load_settings(_Settings, ["--config", str(file)]).redis.url == "redis://exact:3"


def test_a_variable_of_a_block_that_no_service_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the pen would otherwise leave the default in force; blocks of other services are passed over."""
    monkeypatch.setenv("DUALMAP_ROUTER__LOOKS", "4")
    monkeypatch.setenv("DUALMAP_SEVER__PORT", "7000")

    assert _refused(capsys) == ["bad setting: DUALMAP_SEVER__PORT: no service has such a block of settings"]


def test_none_turns_metrics_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is any free port, none is none."""
    monkeypatch.setenv("DUALMAP_METRICS__PORT", "none")

    assert load_settings(_Settings, []).metrics.port is None


def test_each_mistake_gets_one_line_with_both_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator sees all mistakes at once and where to correct them."""
    file = tmp_path / "dualmap.yaml"
    file.write_text("server: {prot: 7000}\npol: {}\n")
    monkeypatch.setenv("DUALMAP_SERVER__PORT", "70000")

    lines = _refused(capsys, ["--config", str(file)])

    assert len(lines) == 3
    assert any("server.port (DUALMAP_SERVER__PORT)" in line and "65535" in line for line in lines)
    assert any("server.prot" in line and "unknown key" in line for line in lines)
    assert any("pol (DUALMAP_POL): unknown key" in line for line in lines)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"DUALMAP_SERVER__HOST": "0.0.0.0"}, "insecure"),
        ({"DUALMAP_METRICS__HOST": "0.0.0.0"}, "metrics.host"),
        ({"DUALMAP_SERVER__TLS_CERT_PATH": "/cert"}, "TLS is not built yet"),
        ({"DUALMAP_REDIS__URL": "http://127.0.0.1"}, "redis://"),
        ({"DUALMAP_REDIS__SENTINEL_MASTER": "mymaster"}, "belong together"),
        ({"DUALMAP_SERVER__PORT": "7000", "DUALMAP_METRICS__PORT": "7000"}, "same port"),
        ({"DUALMAP_SERVER__SPEED": "1"}, "unknown key"),
        ({"DUALMAP_POOL__NAME": "{x}"}, "pool.name"),
    ],
)
def test_what_contradicts_or_is_not_built_is_refused_by_name(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At start, not at the first call."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    lines = _refused(capsys)

    assert len(lines) == 1
    assert named in lines[0]


@pytest.mark.parametrize("content", ["- a list", "a: [", "7"])
def test_a_file_that_is_no_settings_file_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file and quotes nothing of it."""
    file = tmp_path / "dualmap.yaml"
    file.write_text(content)

    assert len(_refused(capsys, ["--config", str(file)])) == 1


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A named file that is not there is a mistake, not an empty file."""
    assert "No such file" in _refused(capsys, ["--config", str(tmp_path / "none.yaml")])[0]


def test_an_open_host_is_served_when_insecure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In compose, say."""
    monkeypatch.setenv("DUALMAP_SERVER__HOST", "0.0.0.0")
    monkeypatch.setenv("DUALMAP_SERVER__INSECURE", "true")

    assert load_settings(_Settings, []).metrics_host == "0.0.0.0"


def test_printing_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are logged at start."""
    monkeypatch.setenv("DUALMAP_REDIS__URL", "redis://user:hunter2@127.0.0.1:1/0?password=hunter2")
    monkeypatch.setenv("DUALMAP_POOL__HASH_KEY", "hunter2")

    printed = str(load_settings(_Settings, []).printable())

    assert "hunter2" not in printed
    assert "127.0.0.1:1" in printed


def test_a_bad_password_is_not_shown_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error about the URL names the field, not its value."""
    monkeypatch.setenv("DUALMAP_REDIS__URL", "postgres://user:hunter2@h")

    assert "hunter2" not in "".join(_refused(capsys))


def test_settings_do_not_change() -> None:
    """Read once, then frozen."""
    settings = load_settings(_Settings, [])

    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1  # type: ignore[misc]


def test_every_field_gives_a_reason_for_its_default() -> None:
    """The description is what an operator reads."""
    for block in ServiceSettings.model_fields.values():
        kind = block.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Block)
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "router")),
    ],
)
def test_loopback_is_told_from_the_rest(host: str, loopback: bool) -> None:
    """A name is not loopback, whatever it resolves to."""
    assert is_loopback(host) is loopback


def test_a_url_without_password_is_left_as_it_is() -> None:
    """Only what must be hidden is hidden."""
    assert mask_password("unix:///run/redis.sock") == "unix:///run/redis.sock"


def test_one_file_serves_all_services(tmp_path: Path) -> None:
    """Blocks of other services are passed over, whatever they hold: those services check them themselves."""
    file = tmp_path / "dualmap.yaml"
    file.write_text("pool: {name: p}\nagent: {routers: [a]}\nrouter: {threads: 3}\npoll: {interval_ms: 50}\nheat: {}\n")

    settings = load_settings(_Settings, ["--config", str(file)])

    assert (settings.pool.name, settings.agent.routers) == ("p", ("a",))


def test_a_block_of_no_service_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt block must not be taken for another service's."""
    file = tmp_path / "dualmap.yaml"
    file.write_text("rooter: {threads: 3}\n")

    assert _refused(capsys, ["--config", str(file)]) == ["bad setting: rooter (DUALMAP_ROOTER): unknown key"]


@pytest.mark.parametrize("service", ["instanceagent", "rebalancer", "ringmanager", "router", "statecollector"])
def test_every_block_a_service_reads_is_known_to_the_others(service: str) -> None:
    """A new block that is not named in the shared list would be refused by four services."""
    settings = importlib.import_module(f"services.{service}.settings").Settings

    assert set(settings.model_fields) - set(ServiceSettings.model_fields) <= SERVICE_KEYS


@pytest.mark.parametrize(
    ("redis", "problem"),
    [
        ("sentinels: [a:1]", "belong together"),
        ("sentinel_master: m", "belong together"),
        ("sentinels: [a], sentinel_master: m", "not host:port"),
        ("url: 'unix:///r', sentinels: [a:1], sentinel_master: m", "sentinels name hosts"),
    ],
)
def test_half_a_sentinel_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], redis: str, problem: str
) -> None:
    """What cannot be reached is said at start."""
    file = tmp_path / "dualmap.yaml"
    file.write_text(f"redis: {{{redis}}}\n")

    (line,) = _refused(capsys, ["--config", str(file)])

    assert problem in line


def test_sentinels_become_the_clients_options(tmp_path: Path) -> None:
    """The URL gives user, password and database; what is printed holds no secret."""
    file = tmp_path / "dualmap.yaml"
    file.write_text(
        "redis: {url: 'rediss://u:secret@ignored/2', sentinels: ['s1:26379', '[::1]:26380'], sentinel_master: m,"
        " sentinel_password: hidden}\n"
    )

    settings = load_settings(_Settings, ["--config", str(file)])
    options = settings.redis.options("test")

    assert options.sentinel is not None
    assert options.sentinel.sentinels == (("s1", 26379), ("::1", 26380))
    assert (options.sentinel.master, options.sentinel.password) == ("m", "hidden")
    assert "hidden" not in repr(options.sentinel) + str(settings.printable())
    assert "secret" not in settings.redis.where + str(settings.printable())
