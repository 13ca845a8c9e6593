"""What the routers and the rebalancer see of the instances: the exact state, or polled views of some age."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, overload

from dualmap.core.bookings import Bookings
from dualmap.core.instance_view import InstanceView
from dualmap.core.membership import InstanceState, Member
from dualmap.core.state import StateUpdate
from dualmap.simulator.instance import SimInstance

Default = TypeVar("Default")


def new_view(instance: SimInstance, router_id: int) -> InstanceView:
    """A view that has heard nothing yet."""
    view = InstanceView(instance.instance_id, router_id=router_id)
    view.member = Member(instance.instance_id, "", state=InstanceState.ACTIVE)
    return view


class ExactViews(dict[str, InstanceView]):
    """Views that are the instances themselves: reading one brings its load up to now."""

    def __init__(self, refresh: Callable[[InstanceView], None]) -> None:
        super().__init__()
        self._refresh = refresh

    def __getitem__(self, instance_id: str) -> InstanceView:
        view = super().__getitem__(instance_id)
        self._refresh(view)
        return view

    @overload
    def get(self, instance_id: str, default: None = None, /) -> InstanceView | None: ...
    @overload
    def get(self, instance_id: str, default: InstanceView, /) -> InstanceView: ...
    @overload
    def get(self, instance_id: str, default: Default, /) -> InstanceView | Default: ...
    def get(self, instance_id: str, default: object = None, /) -> object:
        """The view, fresh, or the default."""
        view = super().get(instance_id)
        if view is None:
            return default
        self._refresh(view)
        return view


class Watcher:
    """One reader of the pool's state. ``placed_tokens``: prompt tokens it sent since the state it holds."""

    def __init__(self, router_id: int, views: dict[str, InstanceView]) -> None:
        self.router_id = router_id
        self.views = views
        self.pending_prompt_tokens: dict[str, float] = {}
        self.reloads = 0

    def join(self, instance: SimInstance) -> None:
        """A new member: nothing is known of it but its name."""
        dict.__setitem__(self.views, instance.instance_id, new_view(instance, self.router_id))

    def view_of(self, instance_id: str) -> InstanceView | None:
        """The view without bringing it up to date."""
        return dict.get(self.views, instance_id)

    def heard(self, update: StateUpdate, pending_prompt_tokens: int, now_s: float) -> bool:
        """Take a polled state in; False: it must be loaded whole."""
        view = self.view_of(update.instance_id)
        if view is None:
            return True
        view.reachable = True
        self.pending_prompt_tokens[update.instance_id] = pending_prompt_tokens
        taken = view.apply(update, now_s * 1_000)
        self.reloads += not taken
        return taken


def cover_bookings(view: InstanceView, now_ms: float) -> None:
    """What a polled view does on arrival of a load, for an exact one."""
    bookings: Bookings = view.bookings
    if not bookings.expects:
        return
    if len(bookings):
        for seen in view.load.tickets:
            if seen.router_id == view.router_id:
                bookings.cover(seen)
    bookings.expire(now_ms, view.booking_ttl_ms)


def set_member_state(watchers: Iterable[Watcher], instance_id: str, state: InstanceState) -> None:
    """Every reader learns the new state of a member."""
    for watcher in watchers:
        view = watcher.view_of(instance_id)
        if view is not None:
            view.member = Member(instance_id, "", state=state)
