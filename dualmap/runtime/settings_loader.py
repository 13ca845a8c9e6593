"""Reads a service's settings at start: one clear line for each mistake, then exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from dualmap.runtime.settings import PREFIX, SERVICE_KEYS, ServiceSettings, variable_name

EXIT_BAD_SETTING = 2

S = TypeVar("S", bound=ServiceSettings)


def load_settings(kind: type[S], argv: Sequence[str] | None = None, flags: Mapping[str, str] | None = None) -> S:
    """Settings from `DUALMAP_…` variables and the YAML file of `--config` or DUALMAP_CONFIG.

    One file may hold the blocks of all services: those of others are passed over, a block of nobody is refused.

    ``argv`` is without the program's name; absent, the process's own. ``flags``: options that stand for a variable and
    go before it. Raises SystemExit(2) after saying what is wrong.
    """
    parser = argparse.ArgumentParser(prog=kind.__module__, description=(kind.__doc__ or "").strip())
    parser.add_argument("--config", type=Path, default=None, help="YAML file; DUALMAP_… variables go before it")
    for flag, variable in (flags or {}).items():
        parser.add_argument(flag, dest=variable, metavar="VALUE", help=f"the same as {variable}")
    arguments = parser.parse_args(argv)
    for variable in (flags or {}).values():
        if (value := getattr(arguments, variable)) is not None:
            os.environ[variable] = value
    path: Path | None = arguments.config
    if path is None and os.environ.get("DUALMAP_CONFIG"):
        path = Path(os.environ["DUALMAP_CONFIG"])
    problems = _unknown_variables(kind, os.environ)
    try:
        settings = kind(**(_own_part(kind, _read_yaml(path)) if path else {}))
    except ValidationError as error:
        problems += [_problem_line(problem["loc"], problem["type"], problem["msg"]) for problem in error.errors()]
    except (SettingsError, _BadFileError) as error:
        problems.append(str(error))
    else:
        if not problems:
            return settings
    for problem in problems:
        print(f"bad setting: {problem}", file=sys.stderr)  # noqa: T201  (logs are not set up before settings are)
    raise SystemExit(EXIT_BAD_SETTING)


def _unknown_variables(kind: type[ServiceSettings], names: Iterable[str]) -> list[str]:
    """A line for each variable of a block that no service has: a slip of the pen must not pass for a default."""
    known = SERVICE_KEYS | kind.model_fields.keys()
    nested = [name for name in names if name.upper().startswith(PREFIX) and "__" in name]
    wrong = [name for name in nested if name[len(PREFIX) :].partition("__")[0].lower() not in known]
    return [f"{name}: no service has such a block of settings" for name in sorted(wrong)]


def _own_part(kind: type[ServiceSettings], content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key in kind.model_fields or key not in SERVICE_KEYS}


class _BadFileError(Exception):
    pass


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _BadFileError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # Not the error's own text: it quotes the file, which may hold a password.
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise _BadFileError(f"{path}: not YAML{where}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _BadFileError(f"{path}: must hold blocks such as redis: and server:")
    return content


def _problem_line(location: tuple[str | int, ...], kind: str, message: str) -> str:
    text = "unknown key" if kind == "extra_forbidden" else message.removeprefix("Value error, ")
    if not location:
        return text
    return f"{'.'.join(map(str, location))} ({variable_name(location)}): {text}"
