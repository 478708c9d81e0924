"""The `holdfast` command: finds command modules by name, and turns errors into one line and an exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys

if __name__ != "__main__" and sys.argv[0].endswith("holdfast"):
    # Ctrl-C while the rest is still being imported: nothing has begun, so end at once and without a traceback.
    signal.signal(signal.SIGINT, lambda _signum, _frame: os._exit(130))

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from api.cli import settings
from statebackend.errors import HoldfastError


class _Entry(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "run": _Entry("api.cli.run", "Run a dataflow with exactly-once checkpoints."),
    "restore": _Entry("api.cli.restore", "Check a savepoint against a flow, show what moves where, then run it."),
    "savepoint": _Entry("api.cli.savepoint", "List, inspect, query, compare, edit, rescale and convert savepoints."),
    "checkpoint": _Entry("api.cli.checkpoint", "List, show, verify and clean up checkpoints."),
    "serve": _Entry("api.cli.serve", "Serve the REST API and the web page."),
    "spark": _Entry("api.cli.spark", "Work with Spark Structured Streaming checkpoints and jobs."),
    "bench": _Entry("benchmarks.cli", "Measure Holdfast on this machine."),
    "config": _Entry("api.cli.config", "Show the settings in force and where each comes from."),
}
"""Every top-level command. One whose module is not installed is not listed."""


class LazyGroup(TyperGroup):
    """Loads a command's module when it is invoked; `--help` of the whole loads none."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, entry in COMMANDS.items() if find_spec(entry.module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in self.list_commands(ctx):
            module = import_module(COMMANDS[cmd_name].module)
            command = typer.main.get_command(module.app)
            command.name = cmd_name
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from difflib import get_close_matches

            near = get_close_matches(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; every error on purpose ends as one line on stderr and the exit code of its kind."""
        try:
            return super().invoke(ctx)
        except HoldfastError as error:
            _fail(error, "; ".join([str(error), *getattr(error, "__notes__", ())]), error.exit_code)
        except KeyboardInterrupt as error:
            _fail(error, "interrupted", 130)
        except BrokenPipeError:
            _close_stdout()
            raise typer.Exit(0) from None
        except OSError as error:
            _fail(error, _describe(error), 7)
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own: usage errors, and the end of a command
                raise
            _fail(error, f"{type(error).__name__}: {error}; HOLDFAST_DEBUG=1 shows where", 1)


def _fail(error: BaseException, message: str, code: int) -> None:
    if os.environ.get("HOLDFAST_DEBUG"):
        raise error
    print(f"{'error: ' if code != 130 else ''}{' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code) from None


def _describe(error: OSError) -> str:
    where = f" (path={error.filename!r})" if error.filename else ""
    return f"{error.strerror or error}{where}; nothing half written was left; make room or fix access, then retry"


def _close_stdout() -> None:
    """A reader such as `head` has gone: end quietly, and keep the interpreter from flushing into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


app = typer.Typer(
    name="holdfast", cls=LazyGroup, rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})


@app.callback()
def root(
    ctx: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")] = False,
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", envvar="HOLDFAST_CONFIG",
                                               help="Settings file (TOML).")] = None,
    _version_: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                            help="Print the version.")] = False,
) -> None:
    """Streaming state that survives: run jobs, take and open savepoints, restore anywhere.

    \b
    Examples:
      holdfast run job.py:flow --checkpoint-dir checkpoints/
      holdfast savepoint convert checkpoints/JOB/chk-12 sp/
      holdfast savepoint inspect sp/
      holdfast savepoint query sp/ "select key, value from count.total order by value desc limit 10"
      holdfast restore sp/ job.py:flow --parallelism 16 --checkpoint-dir checkpoints/
    """
    if quiet:
        os.environ["HOLDFAST_QUIET"] = "1"
    if config:
        os.environ["HOLDFAST_CONFIG"] = config
    ctx.default_map = settings.default_map()


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(prog_name="holdfast")
    except SystemExit as ended:
        _leave(ended)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done or undone; only the interpreter is left to end


def _leave(ended: SystemExit) -> NoReturn:
    """End as multiprocessing's children do: hooks run and streams are flushed, but no native library is torn down.

    Arrow's and RocksDB's background threads may still run when the interpreter dismantles itself, and one that comes
    back to Python then aborts the process: a command that did its work would end with SIGABRT.
    """
    code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if isinstance(ended.code, str):
        print(ended.code, file=sys.stderr)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 7
    os._exit(code)


def _terminated(_signum: int, _frame: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that whatever is half written is removed."""
    raise SystemExit(143)


if __name__ == "__main__":
    main()
