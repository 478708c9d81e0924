"""The command on a terminal (pty): tables, colours, progress; NO_COLOR and --quiet."""

from __future__ import annotations

import re

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def test_a_terminal_gets_a_table_with_colours(on_terminal, sp) -> None:
    code, shown = on_terminal("savepoint", "read", sp, "count.total", "-n", "2")
    assert code == 0
    assert "key_group" in shown
    assert not shown.lstrip().startswith("{")
    assert ESCAPE.search(shown)


def test_no_color_is_honoured(on_terminal, sp) -> None:
    _, shown = on_terminal("savepoint", "read", sp, "count.total", "-n", "2", env={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)


def test_inspect_draws_the_spread_over_key_groups_and_subtasks(on_terminal, sp) -> None:
    _, shown = on_terminal("savepoint", "inspect", sp)
    assert "rows by key group" in shown
    assert "subtask   1" in shown
    assert "█" in shown


def test_progress_goes_to_the_terminal_and_quiet_switches_it_off(on_terminal, sp) -> None:
    _, shown = on_terminal("savepoint", "rescale", sp, "a", "--max-parallelism", "64")
    assert "rescaling" in shown
    assert "wrote a" in shown
    code, silent = on_terminal("--quiet", "savepoint", "rescale", sp, "b", "--max-parallelism", "64")
    assert (code, silent) == (0, "")


def test_binary_formats_are_not_written_to_a_terminal(on_terminal, sp) -> None:
    code, shown = on_terminal("savepoint", "read", sp, "count.total", "-o", "parquet")
    assert code == 2
    assert "redirect" in shown
