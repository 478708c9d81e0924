"""Imports point one way, and each heavy library is known to one layer only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["statebackend", "checkpoint", "savepoint", "spark_integration", "api", "benchmarks"]
HOMES = {
    "pyspark": ("spark_integration/", "benchmarks/"),
    "fastapi": ("api/", "benchmarks/"),
    "uvicorn": ("api/", "benchmarks/"),
    "starlette": ("api/", "benchmarks/"),
    "typer": ("api/", "benchmarks/"),
    "rocksdict": ("statebackend/rocksdb/store.py", "benchmarks/"),
}


def modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Top-level packages that a module imports anywhere in it, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_itself_and_the_layers_below(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1:]) | {"tests"}
    wrong = {f"{path.relative_to(ROOT)} imports {name}" for path in modules() if path.is_relative_to(ROOT / layer)
             for name in imported_names(path) if name in above}
    assert not wrong


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_only_where_it_is_at_home(library: str) -> None:
    wrong = {str(path.relative_to(ROOT)) for path in modules() if library in imported_names(path)
             and not str(path.relative_to(ROOT)).startswith(HOMES[library])}
    assert not wrong


def test_only_the_explicit_pickled_type_knows_pickle() -> None:
    users = {str(path.relative_to(ROOT)) for path in modules()
             if {"pickle", "cloudpickle", "dill"} & set(imported_names(path))}
    assert all(user.startswith(("statebackend/codecs/", "statebackend/types", "spark_integration/", "benchmarks/"))
               for user in users), users


def test_every_module_says_in_its_first_line_what_it_does() -> None:
    silent = [str(path.relative_to(ROOT)) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent
