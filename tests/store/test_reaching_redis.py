"""Ways to the server other than a plain address: ACL users, TLS, a master that sentinels know."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from dualmap.store.connection import RedisOptions, SentinelOptions, StoreError, connect
from dualmap.store.leases import RedisLeases
from tests.waiting import until


def _redis_server() -> str:
    found = shutil.which("redis-server")
    if found is None:
        if os.environ.get("DUALMAP_REQUIRE_REDIS") == "1":
            pytest.fail("redis-server is not on PATH and DUALMAP_REQUIRE_REDIS=1")
        pytest.skip("redis-server is not on PATH: sentinels, TLS and ACL are tried on it")
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([_redis_server(), *arguments], cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def _client(options: RedisOptions) -> AsyncIterator[Redis]:
    client = connect(options)
    try:
        yield client
    finally:
        await client.aclose()


async def _answers(options: RedisOptions) -> bool:
    async with _client(options) as client:
        try:
            return bool(await client.ping())
        except (StoreError, OSError):
            return False


async def test_a_user_with_its_password_in_the_url_is_let_in_and_no_other(tmp_path: Path) -> None:
    """ACL: the default user is off, as on managed servers."""
    port = _free_port()
    user = "user dm on >p%2Fw ~{dm:* &* +@all"
    acl = ("--user", *user.replace("%2F", "/").split()[1:])
    with _running(tmp_path, "--port", str(port), "--save", "", "--user", "default", "off", *acl):
        await until(lambda: _answers(RedisOptions(f"redis://dm:p%2Fw@127.0.0.1:{port}/0")), 10)
        async with _client(RedisOptions(f"redis://dm:p%2Fw@127.0.0.1:{port}/0")) as client:
            assert await RedisLeases(client, "p").acquire("x", "me", 1_000)

        assert not await _answers(RedisOptions(f"redis://dm:wrong@127.0.0.1:{port}/0"))
        assert not await _answers(RedisOptions(f"redis://127.0.0.1:{port}/0"))


def _certificate(folder: Path) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not on PATH: it makes the certificate")
    key, certificate = str(folder / "key.pem"), str(folder / "cert.pem")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def test_a_tls_url_is_checked_against_its_authority(tmp_path: Path) -> None:
    """rediss:// with the authority's file in the query; a certificate of nobody we know is refused."""
    key, certificate = _certificate(tmp_path)
    port = _free_port()
    tls = ("--tls-port", str(port), "--port", "0", "--tls-cert-file", certificate, "--tls-key-file", key)
    with _running(
        tmp_path, *tls, "--tls-ca-cert-file", certificate, "--tls-auth-clients", "no", "--save", ""
    ) as server:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        await until(lambda: server.poll() is not None or _answers(RedisOptions(url)), 10)
        if server.poll() is not None:
            pytest.skip("this redis-server is built without TLS")

        assert not await _answers(RedisOptions(f"rediss://127.0.0.1:{port}/0"))
        assert not await _answers(RedisOptions(f"redis://127.0.0.1:{port}/0"))


@pytest.mark.slow
async def test_a_client_follows_the_master_that_the_sentinels_name(tmp_path: Path) -> None:
    """The master dies, a sentinel promotes the replica: the same client writes on, with its password and database."""
    master, replica, sentinel = _free_port(), _free_port(), _free_port()
    data = ("--save", "", "--requirepass", "pw", "--masterauth", "pw", "--repl-diskless-sync-delay", "0")
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port {sentinel}\nsentinel monitor m 127.0.0.1 {master} 1\nsentinel auth-pass m pw\n"
        "sentinel down-after-milliseconds m 500\nsentinel failover-timeout m 3000\n"
    )
    options = RedisOptions(
        "redis://:pw@ignored:1/2", sentinel=SentinelOptions((("127.0.0.1", 1), ("127.0.0.1", sentinel)), "m")
    )
    follow = ("--replicaof", "127.0.0.1", str(master))
    with (
        _running(tmp_path / "a", "--port", str(master), *data) as first,
        _running(tmp_path / "b", "--port", str(replica), *data, *follow),
        _running(tmp_path, str(conf), "--sentinel"),
    ):
        await until(lambda: _answers(options), 10)
        async with _client(options) as client, _client(RedisOptions(f"redis://:pw@127.0.0.1:{replica}/2")) as second:
            await client.set("k", "before")
            await until(lambda: _is(second, "before"), 10)
            await until(lambda: _knows_replica(sentinel), 15)
            first.kill()

            await until(lambda: _wrote(client, "after"), 20)

            assert await second.get("k") == b"after"
            assert (await client.info("replication"))["role"] == "master"


async def _is(client: Redis, value: str) -> bool:
    try:
        return bool(await client.get("k") == value.encode())
    except (StoreError, OSError):
        return False


async def _knows_replica(sentinel_port: int) -> bool:
    async with _client(RedisOptions(f"redis://127.0.0.1:{sentinel_port}/0")) as client:
        replicas = await client.execute_command("SENTINEL", "REPLICAS", "m")  # type: ignore[no-untyped-call]
        return len(replicas) == 1


async def _wrote(client: Redis, value: str) -> bool:
    try:
        return bool(await client.set("k", value))
    except (StoreError, OSError):
        return False
