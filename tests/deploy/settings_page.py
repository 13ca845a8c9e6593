"""`python -m tests.deploy.settings_page`: writes docs/settings.md from the models; `make settings` calls it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from dualmap.runtime.settings import ServiceSettings, variable_name

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

_SERVICES = {
    "router": "Router",
    "ringmanager": "Ring manager",
    "statecollector": "State collector",
    "rebalancer": "Rebalancer",
    "instanceagent": "Instance agent",
}
_INTRODUCTION = """# Settings

Written by `make settings` from the models; do not edit. Each is a variable `DUALMAP_…`, or a key of the one YAML file
that `--config` or `DUALMAP_CONFIG` names (blocks joined by `__` in the variable are nested there); variables go before
the file. A service ignores the blocks of the others, and refuses keys that nobody has, values out of bounds and
contradictions: one line for each mistake, exit code 2. Traces are set by the standard `OTEL_*` variables.
"""

Row = tuple[str, str, str, str]


def settings_of(service: str) -> type[ServiceSettings]:
    """The settings class of a service."""
    kind: type[ServiceSettings] = importlib.import_module(f"services.{service}.settings").Settings
    return kind


def rows_of(service: str) -> list[Row]:
    """(variable, default, bounds, description) of each setting of a service."""
    return list(_rows(settings_of(service), ()))


def _rows(model: type[BaseModel], place: tuple[str, ...]) -> Iterator[Row]:
    for name, field in model.model_fields.items():
        here = (*place, name)
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, BaseModel):
            yield from _block_rows(default, here)
        else:
            yield (variable_name(here), _shown(default), _bounds(field), field.description or "")


def _block_rows(block: BaseModel, place: tuple[str, ...]) -> Iterator[Row]:
    # The block's own values, not its class's defaults: a service gives its own ports that way.
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        here = (*place, name)
        if isinstance(value, BaseModel):
            yield from _block_rows(value, here)
        else:
            yield (variable_name(here), _shown(value), _bounds(field), field.description or "")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, SecretStr):
        return "empty" if not value.get_secret_value() else "secret"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def _bounds(field: FieldInfo) -> str:
    least = most = ""
    for limit in field.metadata:
        match limit:
            case Ge(ge=value):
                least = f"{value} ≤"
            case Gt(gt=value):
                least = f"{value} <"
            case Le(le=value):
                most = f"≤ {value}"
            case Lt(lt=value):
                most = f"< {value}"
            case MinLen(min_length=value):
                least = f"{value} ≤ length"
            case MaxLen(max_length=value):
                most = f"length ≤ {value}"
            case _:
                continue
    return " … ".join(part for part in (least, most) if part)


def page() -> str:
    """The page as Markdown: what all services have first, then each service's own."""
    by_service = {service: rows_of(service) for service in _SERVICES}
    shared = set.intersection(*(set(rows) for rows in by_service.values()))
    first = next(iter(by_service.values()))
    parts = [_INTRODUCTION, _section("Every service", [row for row in first if row in shared])]
    for service, title in _SERVICES.items():
        parts.append(_section(title, [row for row in by_service[service] if row not in shared]))
    return "\n".join(parts)


def _section(title: str, rows: list[Row]) -> str:
    lines = [f"## {title}\n", "| variable | default | bounds | what, and why the default |", "|---|---|---|---|"]
    for variable, default, bounds, description in rows:
        lines.append(f"| `{variable}` | {default} | {bounds} | {description.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
