"""The prompt of a command line, in exactly one of the forms that routers take. Nothing of it is printed or kept."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dualmap.cli.failures import CommandError
from dualmap.rpc.route_values import Prompt

TokensOption = Annotated[str | None, typer.Option(help="Token ids, such as '1,2,3'.")]
TokensFileOption = Annotated[
    str | None, typer.Option(help="File of token ids, separated by commas or spaces, or a JSON list; - is stdin.")
]
TextOption = Annotated[str | None, typer.Option(help="Plain text, hashed over its bytes: for want of a tokenizer.")]
HashesOption = Annotated[
    str | None, typer.Option(help="Block hashes, decimal or 0x…, made as docs/protocol.md says; needs --prompt-tokens.")
]
CallerIdsOption = Annotated[
    str | None,
    typer.Option(help="Own cumulative prefix ids, as traces have them; needs --prompt-tokens and --block-tokens."),
]
PromptTokensOption = Annotated[int, typer.Option(min=0, help="Tokens of the whole prompt, with hashes or ids.")]
BlockTokensOption = Annotated[int, typer.Option(min=0, help="Tokens of a block, with hashes or ids.")]

_FORMS = "--tokens, --tokens-file, --text, --hashes or --caller-ids"
_MAX_TOKEN = (1 << 32) - 1
_MAX_HASH = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options as they were given; None: not given."""

    tokens: str | None = None
    tokens_file: str | None = None
    text: str | None = None
    hashes: str | None = None
    caller_ids: str | None = None
    prompt_tokens: int = 0
    block_tokens: int = 0

    @property
    def given(self) -> int:
        """How many forms were given."""
        forms = (self.tokens, self.tokens_file, self.text, self.hashes, self.caller_ids)
        return sum(form is not None for form in forms)

    def prompt(self) -> Prompt:
        """The prompt. Raises CommandError unless exactly one form is given, and it can be read."""
        if self.given != 1:
            raise CommandError(f"give the prompt once: {_FORMS}", exit_code=2)
        if self.text is not None:
            return Prompt.of_text(self.text)
        if self.tokens is not None:
            return Prompt.of_tokens(_numbers(self.tokens, "--tokens", _MAX_TOKEN))
        if self.tokens_file is not None:
            return Prompt.of_tokens(_numbers(_read(self.tokens_file), "--tokens-file", _MAX_TOKEN))
        if self.prompt_tokens < 1:
            raise CommandError("--prompt-tokens is needed with hashes or ids: the tokens of the whole prompt", 2)
        if self.hashes is not None:
            hashes = _numbers(self.hashes, "--hashes", _MAX_HASH)
            return Prompt.of_hashes(hashes, self.prompt_tokens, self.block_tokens)
        if self.block_tokens < 1:
            raise CommandError("--block-tokens is needed with --caller-ids: the tokens each id stands for", 2)
        ids = _numbers(self.caller_ids or "", "--caller-ids", _MAX_HASH)
        return Prompt.of_caller_ids(ids, self.prompt_tokens, self.block_tokens)


def _numbers(text: str, option: str, highest: int) -> list[int]:
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    numbers: list[int] = []
    for place, word in enumerate(filter(None, words), start=1):
        try:
            number = int(word, 0)
        except ValueError:
            number = -1
        if not 0 <= number <= highest:
            # The word itself stays out of the message: it is part of a prompt.
            raise CommandError(f"{option}: number {place} is not a whole number from 0 to {highest}", exit_code=2)
        numbers.append(number)
    return numbers


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--tokens-file {name}: {getattr(error, 'strerror', None) or 'is not text'}") from error
