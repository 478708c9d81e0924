"""`holdfast restore`: hold a job against a savepoint, show what moves where, then run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli import output as out
from api.cli.output import Format, Output
from api.cli.run_options import Job, RunOptions, takes_run_options

if TYPE_CHECKING:
    from checkpoint.runtime.checking import RestoreReport

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)


@app.command()
@takes_run_options
def restore(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder or URL of a savepoint or checkpoint.")],
    job: Job,
    options: RunOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and stop.")] = False,
    output: Output = None,
) -> None:
    """Check a savepoint against a job, show what moves where, then run the job from it.

    The savepoint is left alone (unless --claim); the job gets a new id. Where the check refuses, nothing is run.

    \b
    Examples:
      holdfast restore sp/ job.py:flow --parallelism 16 --checkpoint-dir checkpoints/
      holdfast restore sp/ job.py:flow --map-uid count=counts --dry-run
    """
    from api.cli.checking import check_job
    from statebackend.errors import IncompatibleState

    report = check_job(path, job, options.map_uid, options.allow_non_restored_state, options.parallelism)
    _show(path, report, output if dry_run else None, to_stdout=dry_run)
    if not report:
        refused = next(state for state in report.states if state.fate.value == "refused")
        raise IncompatibleState(f"the job would not restore: {refused.reason}", operator=refused.operator,
                                state=refused.state, hint="see holdfast savepoint check")
    if dry_run:
        return
    from api.cli.run import run_job

    run_job(job, options, path, output)


def _show(path: str, report: RestoreReport, output: Format | None, *, to_stdout: bool) -> None:
    """What moves where: as the result of a dry run, else as notes before the job starts."""
    rows = _moves(path, report)
    if to_stdout:
        out.emit_rows(rows, output, name="operator", human={"bytes": out.size})
        return
    for state in report.states:
        out.note(f"{state.operator}{'.' + state.state if state.state else ''}: {state.fate.value}"
                 + (f" ({state.reason})" if state.reason else ""))
    for row in rows:
        if row["from_subtasks"] != [row["subtask"]]:
            out.note("{operator} subtask {subtask}: key groups {key_groups} from old subtasks {0}".format(
                ", ".join(map(str, row["from_subtasks"])), **row))


def _moves(path: str, report: RestoreReport) -> list[dict[str, Any]]:
    import savepoint
    from savepoint.rescale import plan_rescale

    found: list[dict[str, Any]] = []
    with savepoint.open(path) as opened:
        for uid, (old, new) in report.parallelism.items():
            if old is not None and opened.metadata.operator(uid) is not None:
                found += plan_rescale(opened, new, uid)
    return found
