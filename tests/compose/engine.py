"""One compose project as the test sees it: whatever Compose is present, and the containers behind its labels.

Starts, kills and removes nothing but this project's own containers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORTS = ("ROUTER_1_PORT", "ROUTER_2_PORT", "JAEGER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
_PROJECT_LABEL = "com.docker.compose.project"
_SERVICE_LABEL = "com.docker.compose.service"
_ONE_OFF_LABEL = "com.docker.compose.oneoff"


class Failed(Exception):
    """The cluster does not do what it should; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container; ``health`` is None where no check is defined, ``ports`` are this machine's by the container's."""

    container_id: str
    name: str
    service: str
    running: bool
    health: str | None
    ports: Mapping[str, int]

    @property
    def well(self) -> bool:
        """Running, and healthy where that is checked."""
        return self.running and self.health in {None, "healthy"}


def compose_tools() -> dict[str, tuple[str, ...] | None]:
    """Both generations of Compose by name; None for one that is not here."""
    v1 = ("docker-compose",) if shutil.which("docker-compose") else None
    plugin = ("docker", "compose")
    found = subprocess.run([*plugin, "version"], capture_output=True, check=False, timeout=30).returncode == 0
    return {"docker compose": plugin if found else None, "docker-compose": v1}


def engine_answers() -> bool:
    """Whether a Docker engine can be asked."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30).returncode == 0


class Project:
    """One project, bounded by one deadline: what is not done by then fails."""

    def __init__(self, tool: tuple[str, ...], name: str, image: str, limit_s: float) -> None:
        self.name = name
        self.image = image
        self._tool = tool
        self._deadline_s = time.monotonic() + limit_s
        self.ports = _free_ports(PORTS)
        self.environment = os.environ | {"DUALMAP_IMAGE": image} | {key: str(port) for key, port in self.ports.items()}

    def left_s(self) -> float:
        """Seconds until the deadline. Raises Failed when there are none."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise Failed("the time for the whole test is over")
        return left_s

    def compose(self, *arguments: str, tool: tuple[str, ...] | None = None) -> str:
        """Run Compose on the unchanged file; gives stdout."""
        return self._run([*self._compose(tool), *arguments])

    def start_compose(self, *arguments: str) -> subprocess.Popen[str]:
        """The same in the background."""
        return subprocess.Popen(
            [*self._compose(None), *arguments],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def docker(self, *arguments: str) -> str:
        """Run docker; gives stdout."""
        return self._run(["docker", *arguments])

    def containers(self, service: str = "") -> tuple[Container, ...]:
        """The project's containers, or one service's, without those made by `run`."""
        filters = [f"label={_PROJECT_LABEL}={self.name}", f"label={_ONE_OFF_LABEL}=False"]
        if service:
            filters.append(f"label={_SERVICE_LABEL}={service}")
        ids = self.docker("ps", "-aq", *(part for text in filters for part in ("--filter", text))).split()
        return tuple(_container(facts) for facts in json.loads(self.docker("inspect", *ids))) if ids else ()

    def wait_well(self, timeout_s: float) -> int:
        """Wait until every container is well; gives their number. Raises Failed naming the others."""
        until_s = time.monotonic() + min(timeout_s, self.left_s())
        while True:
            found = self.containers()
            ill = [container for container in found if not container.well]
            if found and not ill:
                return len(found)
            if time.monotonic() > until_s:
                raise Failed("not well: " + "".join(f"\n{c.name}: {c.health}{self.log_tail(c)}" for c in ill))
            time.sleep(0.5)

    def log_tail(self, container: Container, lines: int = 5) -> str:
        """The container's last lines, indented."""
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), container.container_id],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return "".join(f"\n  {line[:300]}" for line in (done.stdout + done.stderr).splitlines())

    def remove(self) -> None:
        """Take everything down, volumes too, whatever time is left."""
        # `down` leaves what `run` made and was cut off.
        label = f"label={_PROJECT_LABEL}={self.name}"
        left = ["docker", "ps", "-aq", "--filter", label, "--filter", f"label={_ONE_OFF_LABEL}=True"]
        for container_id in subprocess.run(left, capture_output=True, text=True, timeout=30, check=True).stdout.split():
            subprocess.run(["docker", "rm", "-f", container_id], capture_output=True, timeout=60, check=True)
        subprocess.run(
            [*self._compose(None), "--profile", "demo", "down", "--volumes", "--remove-orphans", "--timeout", "10"],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            timeout=120,
            check=True,
        )

    def _compose(self, tool: tuple[str, ...] | None) -> list[str]:
        return [*(tool or self._tool), "--project-name", self.name, "--file", str(ROOT / "docker-compose.yml")]

    def _run(self, command: list[str]) -> str:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=self.left_s(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{' '.join(command[:6])} …: the time for the whole test is over") from error
        if done.returncode != 0:
            raise Failed(
                f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout


def _container(facts: Mapping[str, Any]) -> Container:
    state = facts["State"]
    return Container(
        container_id=facts["Id"],
        name=facts["Name"].lstrip("/"),
        service=facts["Config"]["Labels"][_SERVICE_LABEL],
        running=state["Running"],
        health=state["Health"]["Status"] if "Health" in state else None,
        ports={inner: int(outer[0]["HostPort"]) for inner, outer in facts["NetworkSettings"]["Ports"].items() if outer},
    )


def _free_ports(names: tuple[str, ...]) -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    try:
        return {name: held.getsockname()[1] for name, held in zip(names, sockets, strict=True)}
    finally:
        for held in sockets:
            held.close()
