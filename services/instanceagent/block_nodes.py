"""Engine blocks as nodes of a tree, and the routing blocks of ours that they are parts of. No decision is made here."""

from __future__ import annotations

from collections.abc import Iterator

from services.instanceagent.learnt_scopes import Scope

FEW = 16
"""Routing blocks of a node kept in a list; more go into a dictionary, where leaving is as quick as coming."""


class RoutingBlock:
    """One block of ours on one path of engine blocks: held while ``missing`` of its parts is 0."""

    __slots__ = ("hash", "missing", "parts")

    def __init__(self, block_hash: int, parts: tuple[Node, ...]) -> None:
        self.hash = block_hash
        self.parts = parts
        self.missing = sum(not part.media for part in parts)


class Node:
    """An engine block. Resolved: ``chain`` is our hash up to the last boundary, ``tail`` the tokens after it.

    ``media`` is a bit for each medium that holds it. A node held nowhere stays while a child needs it.
    """

    __slots__ = (
        "chain", "children", "ends", "key", "leaves", "media", "parent", "parent_key", "resolved", "routing", "scope",
        "size", "tail",
    )  # fmt: skip

    def __init__(self, key: int, parent_key: int | None, token_ids: bytes, leaves: tuple[str, ...]) -> None:
        self.key = key
        self.parent_key = parent_key
        self.leaves = leaves
        self.tail = token_ids
        self.size = len(token_ids)
        self.media = 0
        self.children = 0
        self.resolved = False
        self.scope: Scope | None = None
        self.chain = 0
        self.parent: Node | None = None
        # Most nodes are part of one routing block, those where prompts part of thousands.
        self.routing: list[RoutingBlock] | dict[RoutingBlock, None] = []
        self.ends: tuple[RoutingBlock, ...] = ()

    def link(self, block: RoutingBlock) -> None:
        """This node is part of that block."""
        routing = self.routing
        if isinstance(routing, list):
            if len(routing) < FEW:
                routing.append(block)
                return
            routing = self.routing = dict.fromkeys(routing)
        routing[block] = None

    def unlink(self, block: RoutingBlock) -> None:
        """It is no more."""
        routing = self.routing
        if isinstance(routing, list):
            routing.remove(block)
        else:
            del routing[block]


class Entry:
    """All paths that end in one of our hashes, and the tier last told for it (0: none)."""

    __slots__ = ("blocks", "shown")

    def __init__(self) -> None:
        self.blocks: list[RoutingBlock] = []
        self.shown = 0


def ancestors(node: Node, tail_bytes: int) -> Iterator[Node]:
    """The nodes that hold the last ``tail_bytes`` before this one, nearest first."""
    parent = node.parent
    while tail_bytes > 0 and parent is not None:
        yield parent
        tail_bytes -= parent.size
        parent = parent.parent
