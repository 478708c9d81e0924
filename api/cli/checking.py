"""What `verify` and `check` print, for savepoints and checkpoints alike."""

from __future__ import annotations

from api.cli import output as out
from api.cli.output import Format


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
