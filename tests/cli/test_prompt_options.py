"""A prompt on a command line: one form, read whole, and never repeated in a refusal."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest

from dualmap.cli.failures import CommandError
from dualmap.cli.prompt_options import PromptOptions


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", " [1, 2, 3]\n", "0x1, 2,\n3"])
def test_token_ids_are_read_however_they_are_separated(text: str, tmp_path: Path) -> None:
    """From the line and from a file, as little-endian uint32."""
    path = tmp_path / "ids.json"
    path.write_text(text)

    assert PromptOptions(tokens=text).prompt().token_ids == struct.pack("<3I", 1, 2, 3)
    assert PromptOptions(tokens_file=str(path)).prompt().token_ids == struct.pack("<3I", 1, 2, 3)


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a prompt need not be on a command line that others can list."""
    monkeypatch.setattr("sys.stdin", io.StringIO("7 8"))

    assert PromptOptions(tokens_file="-").prompt().token_ids == struct.pack("<2I", 7, 8)


def test_the_other_forms_keep_what_they_need() -> None:
    """Text as it is; hashes and ids with their counts."""
    assert PromptOptions(text="hi").prompt().text == "hi"
    hashes = PromptOptions(hashes="0xff,2", prompt_tokens=300).prompt()
    ids = PromptOptions(caller_ids="5", prompt_tokens=600, block_tokens=512).prompt()

    assert (hashes.hashes, hashes.prompt_tokens, hashes.caller) == ((255, 2), 300, False)
    assert (ids.hashes, ids.block_tokens, ids.caller) == ((5,), 512, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (PromptOptions(), "give the prompt once"),
        (PromptOptions(text="a", tokens="1"), "give the prompt once"),
        (PromptOptions(hashes="1"), "--prompt-tokens is needed"),
        (PromptOptions(caller_ids="1", prompt_tokens=5), "--block-tokens is needed"),
        (PromptOptions(tokens="1,secret"), "--tokens: number 2 is not a whole number"),
        (PromptOptions(tokens="4294967296"), "from 0 to 4294967295"),
        (PromptOptions(tokens_file="/nowhere/ids"), "/nowhere/ids: No such file"),
    ],
)
def test_what_cannot_be_read_is_named(options: PromptOptions, says: str) -> None:
    """The option is named, its content is not."""
    with pytest.raises(CommandError, match=says) as refused:
        options.prompt()

    assert "secret" not in str(refused.value)
