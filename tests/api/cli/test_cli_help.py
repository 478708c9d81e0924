"""Help, settings and documentation: every command explains itself and has its place in docs/cli.md; help is quick."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import typer

from api.cli.main import COMMANDS, app

DOCS = Path(__file__).resolve().parents[3] / "docs/cli.md"


def commands() -> list[tuple[str, object]]:
    """Every command of every installed module, by its full name."""
    found: list[tuple[str, object]] = []
    for name, entry in COMMANDS.items():
        try:
            module = importlib.import_module(entry.module)
        except ModuleNotFoundError as error:
            if error.name == entry.module:
                continue
            raise
        command = typer.main.get_command(module.app)
        inner = getattr(command, "commands", None)
        found += [(f"{name} {verb}", sub) for verb, sub in inner.items()] if inner else [(name, command)]
    return found


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_has_help_with_examples_and_a_place_in_the_docs(name, command) -> None:
    assert command.help
    assert re.search("Examples?:", command.help)
    assert f"holdfast {name}" in command.help
    assert re.search(rf"^#+ .*`holdfast {re.escape(name)}", DOCS.read_text(), re.M), f"docs/cli.md has no section for {name}"


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_the_docs_have_every_option_of_a_command_and_no_other(name, command) -> None:
    section = DOCS.read_text().partition(f"$ holdfast {name} --help\n")[2].partition("```")[0]
    told = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", section, re.M)) | set(re.findall(r" / (--[a-z-]+)", section))
    there = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
             if option.startswith("--")}
    assert told - {"--help", "--install-completion", "--show-completion"} == \
        there - {"--help", "--install-completion", "--show-completion"}


def test_no_command_has_gone_missing() -> None:
    names = {name for name, _ in commands()}
    assert {f"savepoint {verb}" for verb in (
        "list", "inspect", "read", "query", "diff", "edit", "transform", "rescale", "convert", "check", "verify", "copy",
        "dispose", "bootstrap")} <= names
    assert {f"checkpoint {verb}" for verb in ("list", "show", "verify", "gc", "probe")} <= names
    assert {"restore", "config show"} <= names


def test_help_loads_none_of_the_heavy_libraries(holdfast) -> None:
    script = ("import sys; sys.argv = ['holdfast', '--help']\n"
              "from api.cli.main import main\n"
              "try:\n    main()\nexcept SystemExit:\n    pass\n"
              "heavy = {'pyarrow', 'pandas', 'duckdb', 'fastapi', 'pyspark', 'numpy', 'rich', 'fsspec'} & set(sys.modules)\n"
              "assert not heavy, heavy")
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "savepoint" in done.stdout


def test_unknown_commands_are_answered_with_the_nearest(holdfast) -> None:
    done = holdfast("savepiont")
    assert done.returncode == 2
    assert "Did you mean 'savepoint'" in done.stderr


def test_completion_knows_the_commands(holdfast) -> None:
    done = holdfast(env={"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast savep", "COMP_CWORD": "1"})
    assert "savepoint" in done.stdout
    done = holdfast(env={"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": "holdfast savepoint re", "COMP_CWORD": "2"})
    assert {"read", "rescale"} <= set(done.stdout.split())


def test_settings_come_from_flag_environment_file_and_default_in_this_order(holdfast, tmp_path, sp) -> None:
    (tmp_path / "holdfast.toml").write_text('backend = "rocksdb"\noutput = "csv"\n')
    rows = {row["name"]: row for row in json.loads(holdfast("config", "show", "-o", "json").stdout)}
    assert (rows["backend"]["value"], rows["backend"]["origin"]) == ("rocksdb", "file holdfast.toml")
    assert rows["port"]["origin"] == "default"
    env = {"HOLDFAST_BACKEND": "memory", "HOLDFAST_OUTPUT": "json"}
    rows = {row["name"]: row for row in json.loads(holdfast("config", "show", env=env).stdout)}
    assert rows["backend"]["origin"] == "environment HOLDFAST_BACKEND"
    assert holdfast("savepoint", "list", sp).stdout.startswith("path,")
    assert holdfast("savepoint", "list", sp, env=env).stdout.startswith("[")
    assert holdfast("savepoint", "list", sp, "-o", "name", env=env).stdout.strip() == str(sp)


def test_a_settings_file_with_a_typing_error_is_refused(holdfast, tmp_path) -> None:
    (tmp_path / "holdfast.toml").write_text('bakend = "x"\n')
    done = holdfast("config", "show")
    assert done.returncode == 2
    assert "bakend" in done.stderr


def test_the_version_is_told(holdfast) -> None:
    assert holdfast("--version").stdout.startswith("holdfast 0.")


def test_the_group_has_a_name() -> None:
    assert app.info.name == "holdfast"
