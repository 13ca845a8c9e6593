"""Named components, each ok or failing for a reason, merged to liveness and readiness. Checks nothing by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from dualmap.runtime.logs import get_log

LIVENESS = "liveness"
READINESS = ""
"""gRPC's own name for a server as a whole."""

_STARTING = "starting"
_log = get_log("health")


@dataclass(frozen=True, slots=True)
class ComponentState:
    """One component as it is now; ``problem`` is None when it is well."""

    name: str
    problem: str | None


class Component:
    """What a part of the process holds to say how it is; safe from any thread."""

    def __init__(self, name: str, changed: Callable[[ComponentState], None]) -> None:
        self.name = name
        self._changed = changed

    def ok(self) -> None:
        """The component works."""
        self._changed(ComponentState(self.name, None))

    def fail(self, problem: str) -> None:
        """The component does not work, and why (shown to operators: no secrets, no prompts)."""
        self._changed(ComponentState(self.name, problem))


class Health:
    """Readiness is every gating component being ok and no stop under way; liveness is every vital one being ok.

    A component is failing ("starting") until it first says otherwise; a vital one is ok until it fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, ComponentState] = {}
        self._gating: set[str] = set()
        self._vital: set[str] = set()
        self._stopping = False
        self._watchers: list[Callable[[], None]] = []

    def component(self, name: str, *, gates: bool = True, vital: bool = False) -> Component:
        """A new component. ``gates``: readiness needs it. ``vital``: the process should be killed when it fails.

        Raises ValueError for a name in use.
        """
        with self._lock:
            if name in self._states or name in {LIVENESS, READINESS}:
                raise ValueError(f"health component {name!r} exists already")
            self._states[name] = ComponentState(name, None if vital else _STARTING)
            if gates:
                self._gating.add(name)
            if vital:
                self._vital.add(name)
        return Component(name, self._change)

    @property
    def ready(self) -> bool:
        """Whether calls should come here."""
        with self._lock:
            return not self._stopping and self._all_ok(self._gating)

    @property
    def alive(self) -> bool:
        """Whether the process should go on living; true while it drains."""
        with self._lock:
            return self._all_ok(self._vital)

    def states(self) -> tuple[ComponentState, ...]:
        """Every component, by name."""
        with self._lock:
            return tuple(sorted(self._states.values(), key=lambda state: state.name))

    def summary(self) -> dict[str, bool]:
        """Ok or not for each gRPC health name: readiness, liveness, each component."""
        components = {state.name: state.problem is None for state in self.states()}
        return {READINESS: self.ready, LIVENESS: self.alive, **components}

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change, in the thread that made it; it must not block."""
        with self._lock:
            self._watchers.append(changed)

    def stop(self) -> None:
        """The process drains: not ready from now on, whatever the components say."""
        with self._lock:
            self._stopping = True
        self._tell()

    def _all_ok(self, names: set[str]) -> bool:
        return all(self._states[name].problem is None for name in names)

    def _change(self, state: ComponentState) -> None:
        with self._lock:
            if self._states[state.name] == state:
                return
            self._states[state.name] = state
        if state.problem is None:
            _log.info("component_ok", component=state.name)
        else:
            _log.warning("component_failing", component=state.name, problem=state.problem)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            watchers = tuple(self._watchers)
        for changed in watchers:
            changed()
