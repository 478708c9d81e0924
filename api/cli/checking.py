"""What `verify` and `check` print, for savepoints and checkpoints alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from api.cli import output as out
from api.cli.output import Format

if TYPE_CHECKING:
    from checkpoint.runtime.checking import RestoreReport


def print_verification(path: str, quiet: bool, output: Format | None) -> bool:
    """Verify and print what was found; whether all is well."""
    from savepoint.verify import verify_savepoint

    with out.quietly(quiet), out.progress("verifying", "bytes") as progress:
        result = verify_savepoint(path, progress=progress)
    document = {"path": result.url, "ok": bool(result), "files": result.files, "bytes": result.size,
                "rows": result.rows, "problems": [vars(problem) for problem in result.problems]}

    def show() -> None:
        print(f"{result.url}: {'all is well' if result else f'{len(result.problems)} problems'} "
              f"({result.files} files, {out.size(result.size)}, {result.rows:,} rows)")
        if result.problems:
            out.emit_rows([vars(problem) for problem in result.problems], Format.TABLE, name="path")

    out.emit_object(document, output, name="path", show=show)
    for problem in result.problems if out.chosen(output) is not Format.TABLE else ():
        out.warn(problem.message + (f" (path={problem.path!r})" if problem.path else ""))
    return bool(result)


def print_check(path: str, job: str, map_uid: list[str] | None, allow_non_restored_state: bool,
                parallelism: list[str] | None, output: Format | None) -> bool:
    """Hold a job against a savepoint and print what would become of its state; whether it would restore."""
    report = check_job(path, job, map_uid, allow_non_restored_state, parallelism)
    out.emit_object(report.to_json(), output, name="checkpoint", show=lambda: show_report(report))
    if not report:
        out.warn("this job would not restore from this savepoint")
    return bool(report)


def check_job(path: str, job: str, map_uid: list[str] | None, allow_non_restored_state: bool,
              parallelism: list[str] | None) -> RestoreReport:
    """The report of a dry run."""
    import savepoint
    from api.cli.run_options import pair_of, parallelism_of
    from checkpoint.runtime.checking import check_restore
    from checkpoint.runtime.loading import load_flow

    with savepoint.open(path) as opened:
        return check_restore(load_flow(job), opened.metadata, uid_mapping=dict(pair_of(item) for item in map_uid or ()),
                             allow_non_restored_state=allow_non_restored_state,
                             parallelism=parallelism_of(parallelism or []) or None)


def show_report(report: RestoreReport) -> None:
    """The report as a table."""
    rows = [{"operator": state.operator, "state": state.state, "fate": state.fate.value, "why": state.reason,
             "stored": state.stored, "declared": state.declared} for state in report.states]
    out.emit_rows(rows, Format.TABLE, name="operator", title=f"restore of {report.checkpoint}",
                  columns=["operator", "state", "fate", "why", "stored", "declared"])
    for uid, (old, new) in report.parallelism.items():
        if old is not None and old != new:
            print(f"{uid}: parallelism {old} -> {new}")
