"""`make compose-test`: the unchanged compose file brought up, loaded, broken, watched recovering, taken down.

Prints each step with its time; ends within 8 minutes. Without an engine it says so and is an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.compose.engine import Container, Failed, Project, compose_tools, engine_answers
from tests.compose.monitoring import Monitoring
from tests.compose.traces import check_traces

LIMIT_S = 460.0
IMAGE = "dualmap:compose-test"
REQUESTS = 500
RATE = 9.0
"""Requests a second: four agents take it, but not without moving some."""
AFTER_KILL = 200
SCALED_AGENTS = 6
_BUSY = "sum(rate(dualmap_router_routes_total[15s])) > bool 4"
STARVED = {"DualMapMassUnreachable", "DualMapInstanceStale", "DualMapDegradedRoutes"}
"""Alerts that fire rightly where a machine gives its processes no time for seconds."""
SINK_FILE = "/spans/spans.jsonl"
SCRAPED = ("router-1", "router-2", "ringmanager-1", "ringmanager-2", "statecollector", "rebalancer", "agent")

Figures = dict[str, Any]


def main() -> int:
    """Run all steps; gives the exit code."""
    tools = compose_tools()
    present = [tool for tool in tools.values() if tool is not None]
    if not engine_answers() or not present:
        _say("no Docker engine with Compose answers here")
        return 2
    project = Project(present[0], f"dualmap-test-{os.getpid()}", IMAGE, LIMIT_S)
    began_s = time.monotonic()
    try:
        _run(project, tools)
    except Failed as problem:
        _say(f"FAILED: {problem}")
        return 1
    finally:
        with _step("down, volumes too"):
            project.remove()
    _say(f"all well in {time.monotonic() - began_s:.0f} s")
    return 0


def _run(project: Project, tools: dict[str, tuple[str, ...] | None]) -> None:
    for name, tool in tools.items():
        if tool is None:
            _say(f"      - {name}: not here, skipped")
            continue
        with _step(f"{name} accepts the file"):
            project.compose("--profile", "demo", "config", "--quiet", tool=tool)
    with _step("image built") as say:
        project.compose("build", "ringmanager-1")
        say(_image_facts(project))
    with _step("up"):
        project.compose("up", "--detach")
    with _step("all healthy") as say:
        say(f"{project.wait_well(200)} containers")
    monitoring = Monitoring(project.ports["PROMETHEUS_PORT"])
    with _step("every target up, every agent on the ring") as say:
        say(_all_up(project, monitoring))
    with _step(f"{REQUESTS} requests from a client container") as say:
        say(_served(_replay(project, REQUESTS, RATE)))
    with _step("every panel of every board has data, no alert but those of a busy machine") as say:
        say(_watched(project, monitoring))
    with _step("traces joined") as say:
        say(_traced(project))
    with _step("an OpenAI client at every agent") as say:
        say(_openai(project))
    with _step(f"a router and an agent killed under {AFTER_KILL} requests") as say:
        say(_kill_under_load(project, monitoring))
    with _step(f"up again with {SCALED_AGENTS} agents") as say:
        project.compose("up", "--detach", "--no-recreate", "--scale", f"agent={SCALED_AGENTS}")
        project.wait_well(150)
        say(_all_up(project, monitoring))
    with _step("100 requests after recovery") as say:
        say(_served(_replay(project, 100, RATE)))


def _image_facts(project: Project) -> str:
    size = int(project.docker("image", "inspect", "--format", "{{.Size}}", project.image))
    base = project.docker("image", "inspect", "--format", "{{.Size}}", _base_image(project))
    compilers = project.docker(
        "run", "--rm", "--network=none", project.image, "sh", "-c", "command -v cc gcc clang ld || true; id -u"
    ).split()
    if compilers != ["10001"]:
        raise Failed(f"the image has compilers, or runs as another user: {compilers}")
    return f"{size / 1e6:.0f} MB, {(size - int(base)) / 1e6:.0f} MB of them ours"


def _base_image(project: Project) -> str:
    named = project.environment.get("BASE_IMAGE")
    if named:
        return named
    lines = (Path(__file__).parents[2] / ".env").read_text(encoding="utf-8").splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("BASE_IMAGE="))


def _all_up(project: Project, monitoring: Monitoring) -> str:
    scraped = [container for service in SCRAPED for container in project.containers(service)]
    agents = len(project.containers("agent"))
    monitoring.wait_targets(len(scraped), min(60, project.left_s()))
    monitoring.wait_value('max(dualmap_ringmanager_members{state="active"})', agents, min(60, project.left_s()))
    return f"{len(scraped)} targets, {agents} instances active"


def _replay(project: Project, requests: int, rate: float) -> Figures:
    return _figures(project.compose(*_replay_arguments(requests, rate)))


def _replay_arguments(requests: int, rate: float) -> list[str]:
    options = f"--prompts tokens --limit {requests} --rate {rate} --json /tmp/figures.json"
    replay = f"dualmap replay /traces/bursts.jsonl.gz --routers router-1:7070,router-2:7070 {options}"
    return ["run", "--rm", "-T", "--no-deps", "demo", "sh", "-c", f"{replay} >/dev/null && cat /tmp/figures.json"]


def _figures(output: str) -> Figures:
    figures: Figures = json.loads(output[output.index("{") :])
    return figures


def _served(figures: Figures) -> str:
    if figures["failed"] or figures["shed"] or figures["done"] != figures["requests"]:
        raise Failed(
            f"{figures['failed']} failed ({figures['begun_and_broken']} in mid-answer), {figures['shed']} shed, "
            f"sends late by {figures['send_lag_p99_ms']:.0f} ms (p99): {figures['errors']}"
        )
    return (
        f"0 failed, attainment {figures['attainment']:.3f}, hit rate {figures['hit_rate']:.3f}, "
        f"{figures['migrations']} migrations, Route p50 {figures['route_p50_ms']:.2f} ms"
    )


def _watched(project: Project, monitoring: Monitoring) -> str:
    queries = monitoring.wait_panels(min(30, project.left_s()))
    firing = set(monitoring.firing())
    if firing - STARVED:
        raise Failed(f"alerts fire on a healthy cluster: {sorted(firing)}")
    return f"{queries} queries" + (f"; this machine is too busy: {sorted(firing)}" if firing else "")


def _traced(project: Project) -> str:
    sink = project.containers("jaeger")[0]
    until_s = time.monotonic() + min(20, project.left_s())
    while True:
        lines = _sink_lines(project, sink)
        if lines is None:
            return "skipped: the trace backend keeps no span file, it is Jaeger itself"
        facts = check_traces(lines)
        if facts.requests == REQUESTS and not facts.problems:
            break
        # Services send their spans every 5 s.
        if time.monotonic() > until_s:
            raise Failed(f"{facts.requests} of {REQUESTS} requests traced; {facts.problems[:5]}")
        time.sleep(1.0)
    if not facts.migrated:
        raise Failed("no request was handed over: nothing shows that such traces join")
    return f"{facts.requests} requests, {facts.migrated} of them handed over, {len(lines)} spans"


def _sink_lines(project: Project, sink: Container) -> list[str] | None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "spans.jsonl"
        try:
            project.docker("cp", f"{sink.container_id}:{SINK_FILE}", str(copy))
        except Failed:
            return None
        text = copy.read_text(encoding="utf-8")
    # The last line may be half written.
    return text[: text.rfind("\n") + 1].splitlines()


def _openai(project: Project) -> str:
    agents = project.containers("agent")
    for agent in agents:
        body = {"model": "default", "prompt": f"Who answers at {agent.name}?", "max_tokens": 4}
        request = Request(
            f"http://127.0.0.1:{agent.ports['8080/tcp']}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=min(20, project.left_s())) as answer:  # noqa: S310  (our own)
                choices = json.load(answer)["choices"]
        except OSError as error:
            raise Failed(f"{agent.name}: {error}") from error
        if len(choices) != 1:
            raise Failed(f"{agent.name} answered {len(choices)} choices")
    return f"{len(agents)} answered, wherever it was served"


def _kill_under_load(project: Project, monitoring: Monitoring) -> str:
    victims = [project.containers("router-1")[0], random.choice(project.containers("agent"))]
    client = project.start_compose(*_replay_arguments(AFTER_KILL, RATE))
    try:
        monitoring.wait_value(_BUSY, 1, min(60, project.left_s()))
        project.docker("kill", *(victim.container_id for victim in victims))
        output, errors = client.communicate(timeout=project.left_s())
    finally:
        client.kill()
    if client.returncode != 0:
        raise Failed(f"the client ended with {client.returncode}: {errors[-1000:]}")
    figures = _figures(output)
    # What had its first token from the killed agent cannot be run again: by design the client is told.
    if figures["failed"] > figures["begun_and_broken"] or figures["shed"]:
        raise Failed(f"failed {figures['failed']}, shed {figures['shed']}: {figures['errors']}")
    return f"{figures['done']} done, {figures['begun_and_broken']} broken in mid-answer, none else failed"


@contextmanager
def _step(name: str) -> Iterator[Callable[[str], None]]:
    """Print the step with its time; the block may say what it saw."""
    said: list[str] = []
    began_s = time.monotonic()
    yield said.append
    _say(f"{time.monotonic() - began_s:5.1f} s  {name}{': ' + said[0] if said else ''}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
