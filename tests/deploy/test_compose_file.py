"""What docker-compose.yml promises: pinned, unprivileged, bounded, reachable from this machine only."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from dualmap.cli.addresses import CollectorsOption, RebalancersOption, RingManagersOption, RoutersOption

ROOT = Path(__file__).parents[2]
THEIRS = {"redis", "jaeger", "prometheus", "grafana"}
FILES = ("docker-compose.yml", "docker-compose.vllm.yml")
OVERRIDES = {"plain": (), "vllm": ("--file", "docker-compose.vllm.yml")}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    return found


@pytest.fixture(scope="module")
def tags() -> dict[str, str]:
    lines = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def test_every_image_is_pinned(services: dict[str, Any], tags: dict[str, str]) -> None:
    """Each comes from .env by a full version, never latest."""
    for service in services.values():
        variable = re.fullmatch(r"\$\{(\w+)\}", service["image"])
        assert variable is not None
        assert re.search(r":v?\d+\.\d+", tags[variable[1]])


def test_ports_are_on_loopback_only(services: dict[str, Any]) -> None:
    """Nothing here is encrypted, so nothing leaves the machine."""
    ports = [port for service in services.values() for port in service.get("ports", ())]

    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_agents_publish_no_fixed_port(services: dict[str, Any]) -> None:
    """Any number of them can run on one machine."""
    assert [port for port in services["agent"].get("ports", ()) if not port.startswith("127.0.0.1::")] == []


def test_our_containers_can_do_little(services: dict[str, Any]) -> None:
    """Read-only root, no capabilities, bounded memory and processes."""
    for name in services.keys() - THEIRS:
        service = services[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]


def test_nothing_waits_for_a_picture(services: dict[str, Any]) -> None:
    """Ours start by the health of ours; of the others only Redis is even named, and only as started."""
    for service in services.values():
        for needed, how in service.get("depends_on", {}).items():
            assert needed not in {"jaeger", "prometheus", "grafana"}
            assert how["condition"] == ("service_started" if needed in THEIRS else "service_healthy")


def test_a_stop_waits_longer_than_the_drain(services: dict[str, Any]) -> None:
    """Else Docker would kill what still hands its queue over."""
    agent = services["agent"]
    drain_s = float(agent["environment"]["DUALMAP_AGENT__DRAIN_TIMEOUT_S"])

    assert float(agent["stop_grace_period"].removesuffix("s")) >= drain_s + 5 + 2


def test_the_metrics_ports_are_those_that_prometheus_asks(services: dict[str, Any]) -> None:
    """A port changed on one side only would look like a process that is down."""
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    asked = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs}
    names = {alias: name for name in services for alias in _names_of(name, services[name])}

    for job, where in asked.items():
        assert where["names"] == [job]
        assert services[names[job]]["environment"]["DUALMAP_METRICS__PORT"] == str(where["port"])


@pytest.mark.parametrize("file", FILES)
def test_every_setting_is_one_that_the_service_reads(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is misspelt, or out of bounds, would be passed over or end the container at its start."""
    checked = 0
    for service in _merged(file).values():
        program = _program_of(service)
        if program is None:
            continue
        checked += 1
        settings = importlib.import_module(f"{program}.settings").Settings
        variables = {
            name: value
            for name, value in service["environment"].items()
            if name.startswith("DUALMAP_") and "__" in name
        }
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, os.path.expandvars(value))
            read = settings().model_dump()
        places = [name.removeprefix("DUALMAP_").lower().split("__") for name in variables]
        assert [".".join(place) for place in places if not _has(read, place)] == []

    assert checked >= 1


def test_a_command_in_a_container_finds_every_service(services: dict[str, Any]) -> None:
    """`dualmap top` needs no option there: each address is a service's name and port."""
    ports = {
        alias: service["environment"]["DUALMAP_SERVER__PORT"]
        for name, service in services.items()
        if "DUALMAP_SERVER__PORT" in service.get("environment", {})
        for alias in _names_of(name, service)
    }
    environment = services["router-1"]["environment"]

    for option in (RoutersOption, CollectorsOption, RingManagersOption, RebalancersOption):
        (variable,) = (extra.envvar for extra in get_args(option)[1:])
        for address in environment[variable].split(","):
            host, _, port = address.partition(":")
            assert ports[host] == port, variable


@pytest.mark.parametrize("files", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("tool", [("docker", "compose"), ("docker-compose",)], ids=" ".join)
def test_compose_accepts_the_file(tool: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Both generations of Compose take it; the one that is not here is skipped by name."""
    if shutil.which(tool[0]) is None or subprocess.run([*tool, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(tool)} is not installed")
    command = [*tool, "--file", "docker-compose.yml", *files, "--profile", "demo", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


def _names_of(name: str, service: dict[str, Any]) -> list[str]:
    return [name, *service.get("networks", {}).get("default", {}).get("aliases", ())]


def _merged(file: str) -> dict[str, dict[str, Any]]:
    """The file's services; in an override each with the base file's command and environment beneath."""
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    own = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
    merged = {}
    for name, service in own.items():
        below = base.get(name, {})
        environment = dict(below.get("environment", {})) | dict(service.get("environment", {}))
        merged[name] = below | service | {"environment": environment}
    return merged


def _program_of(service: dict[str, Any]) -> str | None:
    command = service.get("command", [])
    if command[:2] != ["python", "-m"]:
        return None
    program: str = command[2]
    return "services.instanceagent" if program == "dualmap.cli.agent_with_engine" else program


def _has(settings: object, place: list[str]) -> bool:
    for key in place:
        if not isinstance(settings, dict) or key not in settings:
            return False
        settings = settings[key]
    return True
