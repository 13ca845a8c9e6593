"""Settings blocks that every service shares: `DUALMAP_…` variables over one YAML file, read once, then frozen.

Refuses unknown keys, values out of bounds, contradictions, and places kept for what is not built yet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from dualmap.store.connection import RedisOptions, SentinelOptions

Port = Annotated[int, Field(ge=0, le=65535)]

_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})


SERVICE_KEYS = frozenset(
    {"router", "ring", "lease", "heat", "leader_lease_s", "poll", "share", "rebalance", "agent", "engine", "http"}
)
"""Top-level keys that only some service reads: one file serves all, so each passes over those of the others."""


PREFIX = "DUALMAP_"
SHORT_REDIS_URL = "DUALMAP_REDIS_URL"
"""Also sets redis.url; where DUALMAP_REDIS__URL is set too, that one holds."""


def redis_url_of(environment: Mapping[str, str]) -> str:
    """The Redis URL that these variables name; empty where they name none."""
    return environment.get(variable_name(("redis", "url")), "") or environment.get(SHORT_REDIS_URL, "")


def _split_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
"""Several names: a list in YAML, separated by commas in a variable."""


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Block(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True)


class RedisSettings(Block):
    """Where the shared state lives, and how long a call to it may take."""

    url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="redis://, rediss:// or unix:// with user and password inside; the port Redis itself chose.",
    )
    socket_timeout_s: float = Field(
        default=0.3,
        gt=0,
        le=30,
        description="Longest wait for one answer; a thousand times a loopback round trip, a tenth of a lease.",
    )
    connect_timeout_s: float = Field(
        default=0.3, gt=0, le=30, description="Longest wait for a connection; as the answer's, for the same reason."
    )
    retries: int = Field(
        default=1, ge=0, le=5, description="Second tries of a command; the client's own ten would outlast a lease."
    )
    start_timeout_s: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Longest wait for a first answer at start; a server that starts beside us needs a second or two.",
    )
    sentinels: CommaList = Field(
        default=(), description="host:port of each sentinel. The url then gives scheme, user, password and database."
    )
    sentinel_master: str | None = Field(default=None, description="Master's name at the sentinels.")
    sentinel_username: str = Field(default="", description="User at the sentinels, where they ask for one.")
    sentinel_password: SecretStr = Field(default=SecretStr(""), description="Password at the sentinels.")

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> Self:
        scheme = urlsplit(self.url).scheme
        if scheme not in {"redis", "rediss", "unix"}:
            raise ValueError(f"url must begin with redis://, rediss:// or unix://, not {scheme or 'nothing'}")
        if bool(self.sentinels) != bool(self.sentinel_master):
            raise ValueError("sentinels and sentinel_master belong together; one of them is missing")
        if self.sentinels and scheme == "unix":
            raise ValueError("sentinels name hosts: the url must begin with redis:// or rediss://")
        for address in self.sentinels:
            _host_and_port(address)
        return self

    def options(self, client_name: str) -> RedisOptions:
        """The same for the store's client; ``client_name`` is what CLIENT LIST shows."""
        sentinel = None
        if self.sentinel_master is not None:
            sentinel = SentinelOptions(
                tuple(_host_and_port(address) for address in self.sentinels),
                self.sentinel_master,
                self.sentinel_username,
                self.sentinel_password.get_secret_value(),
            )
        return RedisOptions(
            self.url, self.socket_timeout_s, self.connect_timeout_s, self.retries, client_name, sentinel
        )

    @property
    def where(self) -> str:
        """The server in words for an operator, without secrets."""
        if self.sentinels:
            return f"master {self.sentinel_master} at sentinels {', '.join(self.sentinels)}"
        return mask_password(self.url)


class ServerSettings(Block):
    """The gRPC port."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; loopback, as nothing is encrypted yet.")
    port: Port = Field(default=0, description="0 is any free port: each service names its own default.")
    insecure: bool = Field(
        default=False, description="Serve others than this machine without TLS; must be said, never assumed."
    )
    tls_cert_path: Path | None = Field(default=None, description="Certificate. Not built yet: must be absent.")
    tls_key_path: Path | None = Field(default=None, description="Private key. Not built yet: must be absent.")
    tls_ca_path: Path | None = Field(default=None, description="Clients' authority. Not built yet: must be absent.")
    drain_grace_s: float = Field(
        default=5.0, ge=0, le=300, description="Time running calls get at stop; half of the usual 10 s before a kill."
    )
    max_concurrent_rpcs: int = Field(
        default=256, ge=1, le=65536, description="Calls at once; the next is RESOURCE_EXHAUSTED, so queues stay short."
    )
    max_message_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        le=64 * 1024 * 1024,
        description="Largest message; 4 MiB carries a million token ids.",
    )

    @property
    def reachable_host(self) -> str:
        """What others call this server: the address it listens on or, where that is every one, the machine's name."""
        return socket.gethostname() if self.host in _EVERY_ADDRESS else self.host

    @model_validator(mode="after")
    def _refuse_the_unprotected(self) -> Self:
        if self.tls_cert_path or self.tls_key_path or self.tls_ca_path:
            raise ValueError("TLS is not built yet; remove tls_cert_path, tls_key_path and tls_ca_path")
        if not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} reaches beyond this machine without TLS; say insecure: true to allow it"
            )
        return self


class MetricsSettings(Block):
    """The HTTP port for Prometheus, liveness and readiness."""

    host: str | None = Field(default=None, description="Address to listen on; absent, the server's, as it is as open.")
    port: Port | None = Field(default=0, description="0 is any free port; none serves no metrics.")


class LogSettings(Block):
    """What is logged to stderr, and how."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level logged; at info the route path logs nothing."
    )
    format: Literal["json", "console"] = Field(default="json", description="json for machines, console for people.")


class PoolSettings(Block):
    """The pool of instances that can stand in for one another."""

    name: str = Field(
        default="default",
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$",
        description="Part of every Redis key and of every metric; one pool needs no other name.",
    )
    models: CommaList = Field(
        default=("default",),
        min_length=1,
        max_length=64,
        description="Names the pool answers to, the first by default.",
    )
    ttft_slo_ms: int = Field(
        default=5000, ge=1, le=3_600_000, description="Objective for the first token; the paper's evaluation uses 5 s."
    )
    hash_key: SecretStr = Field(
        default=SecretStr(""), description="Keys the block hashes, so that they say nothing outside; empty is no key."
    )


class ServiceSettings(BaseSettings):
    """What every service reads; a service adds its own blocks by inheriting."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="none",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    redis: RedisSettings = RedisSettings()
    server: ServerSettings = ServerSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    pool: PoolSettings = PoolSettings()

    @property
    def metrics_host(self) -> str:
        """Address of the metrics port."""
        return self.metrics.host or self.server.host

    @model_validator(mode="after")
    def _refuse_open_metrics(self) -> Self:
        if not self.server.insecure and not is_loopback(self.metrics_host):
            raise ValueError("metrics.host reaches beyond this machine; say server.insecure: true to allow it")
        if self.metrics.port and self.metrics.port == self.server.port:
            raise ValueError("metrics.port and server.port are the same port")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  (the names are pydantic's)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Variables first, then what the file said (`load_settings` passes it as arguments)."""
        url = os.environ.get(SHORT_REDIS_URL)
        short = InitSettingsSource(settings_cls, {"redis": {"url": url}} if url else {})
        return env_settings, short, init_settings

    def printable(self) -> dict[str, Any]:
        """All settings, for one log line at start, with every secret masked."""
        printable = self.model_dump(mode="json")
        printable["redis"]["url"] = mask_password(self.redis.url)
        return printable


def mask_password(url: str) -> str:
    """The URL with neither password nor query, which may hold one too."""
    address, mark, _ = url.partition("?")
    return re.sub(r"(?<=://)([^:/@]*):.*@", r"\1:***@", address) + (mark and "?***")


def variable_name(location: tuple[str | int, ...]) -> str:
    """The variable that sets the field at this place."""
    return PREFIX + "__".join(str(part).upper() for part in location)
