"""Writes docs/openapi.json and docs/rest.md from the app, so that both are what is served: `python -m api.rest.document`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from api.rest.app import openapi_document
from api.rest.security import pattern_of, required_role
from api.rest.settings import ServiceSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def document() -> dict[str, Any]:
    """The OpenAPI document, the same on every machine; the version is that of the release and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        made = openapi_document(ServiceSettings(roots=(folder,), database=Path(folder) / "service.db"))
    made["info"]["version"] = "see /overview"
    return made


def rendered(made: dict[str, Any]) -> str:
    """The same as Markdown, a table per family of routes."""
    lines = ["# REST routes", "",
             "Generated from the OpenAPI document by `python -m api.rest.document`. Routes without `/api` answer below "
             "`/v1` too. `role` is what a token needs where the service has tokens.", ""]
    families: dict[str, list[str]] = {}
    for path, methods in made["paths"].items():
        for method, route in methods.items():
            role = required_role(method.upper(), _pattern(path)).name.lower()
            row = f"| `{method.upper()} {path}` | {role} | {_first_line(route)} | {_parameters(route, made)} |"
            families.setdefault((route.get("tags") or ["Service"])[0], []).append(row)
    for family, rows in families.items():
        heading = ["| route | role | what | parameters and body |", "| --- | --- | --- | --- |"]
        lines += [f"## {family}", "", *heading, *rows, ""]
    return "\n".join(lines)


def _pattern(path: str) -> str:
    import re

    return pattern_of(re.sub(r"\{[^}]+\}", "{}", path))


def _first_line(route: dict[str, Any]) -> str:
    return str(route.get("description") or route.get("summary") or "").split("\n")[0].replace("|", "\\|")


def _parameters(route: dict[str, Any], made: dict[str, Any]) -> str:
    named = [f"`{item['name']}`" + ("" if item.get("required") else "?") for item in route.get("parameters", [])
             if item["in"] == "query"]
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    reference = content.get("$ref") or next((item["$ref"] for item in content.get("anyOf", []) if "$ref" in item), None)
    if reference:
        schema = made["components"]["schemas"][reference.rsplit("/", 1)[1]]
        required = schema.get("required", [])
        named += [f"`{name}`" + ("" if name in required else "?") for name in schema.get("properties", {})]
    return ", ".join(named)


def main() -> None:
    made = document()
    (DOCS / "openapi.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
    (DOCS / "rest.md").write_text(rendered(made))


if __name__ == "__main__":
    main()
