"""Runs the Lua scripts that lie in scripts/; each is loaded once a process and again when the server forgot it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import cast

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError

Answer = list[int | bytes | None]
"""What our scripts return: a flat list, first a status number."""


class Script:
    """One script on one client."""

    def __init__(self, client: Redis, name: str) -> None:
        folder = files(__package__).joinpath("scripts")
        text = folder.joinpath("prelude.lua").read_text() + folder.joinpath(f"{name}.lua").read_text()
        self._client = client
        self._script: AsyncScript = client.register_script(text)

    async def run(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Answer:
        """The script's answer. Raises StoreError."""
        return cast("Answer", await self._script(keys=list(keys), args=list(args)))

    async def run_each(
        self, calls: Sequence[tuple[Sequence[str], Sequence[str | bytes | int]]]
    ) -> list[Answer | RedisError]:
        """Several runs (keys, args) in one round trip: to each its answer, or the error that it alone met.

        Raises StoreError where there was no answer at all.
        """
        if len(calls) == 1:
            return [await self.run(*calls[0])]
        async with self._client.pipeline(transaction=False) as pipeline:
            for keys, args in calls:
                pipeline.evalsha(self._script.sha, len(keys), *keys, *args)
            answers = await pipeline.execute(raise_on_error=False)
        for place, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[place] = await self.run(*calls[place])
        return answers


def number(value: int | bytes | None) -> int:
    """A number of an answer; absent is 0. Scripts return 64-bit numbers as text, for Lua's are doubles."""
    return int(value) if value is not None else 0
