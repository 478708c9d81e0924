"""`holdfast checkpoint ...`: list, show, verify and clean up the checkpoints that jobs keep."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli import output as out
from api.cli.output import Output

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

Root = Annotated[str, typer.Argument(metavar="FOLDER", envvar="HOLDFAST_CHECKPOINT_DIR",
                                     help="Checkpoint folder or URL, of one job or of many.")]
Path = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A chk-<n> folder or URL.")]


@app.callback()
def group() -> None:
    """List, show, verify and clean up checkpoints."""


@app.command("list")
def list_(root: Root, output: Output = None) -> None:
    """List the checkpoints of every job below a folder, by job, oldest first.

    \b
    Examples:
      holdfast checkpoint list checkpoints/
      holdfast checkpoint list s3://bucket/checkpoints -o name
    """
    rows = []
    for storage in _jobs(root):
        with storage:
            for info in storage.list_checkpoints():
                rows.append(_row(storage, info))
    out.emit_rows(rows, output, name="path", human={"completed": out.when},
                  columns=["job", "job_id", "checkpoint", "generation", "completed", "status", "path", "problem"])


def _row(storage: Any, info: Any) -> dict[str, Any]:
    head = info.summary
    return {"job": head.job_name if head else None, "job_id": str(storage.job_id), "checkpoint": info.checkpoint_id,
            "generation": head.generation if head else None, "completed": head.completed_timestamp if head else None,
            "status": "completed" if head else "damaged",
            "path": info.path, "problem": str(info.error) if info.error else None}


@app.command()
def show(path: Path, output: Output = None) -> None:
    """Show one checkpoint: operators, states, files and sizes.

    \b
    Examples:
      holdfast checkpoint show checkpoints/JOB/chk-12
      holdfast checkpoint show checkpoints/JOB/chk-12 -o json
    """
    import savepoint
    from api.cli.inspection import describe, show_description

    with savepoint.open(path) as opened:
        document = describe(opened)
        document["new_bytes"] = opened.metadata.new_size
        document["parent"] = opened.metadata.parent
    out.emit_object(document, output, name="path", show=lambda: show_description(document))


@app.command()
def verify(path: Path, quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
           output: Output = None) -> None:
    """Check every checksum, reference, schema, order and key group of a checkpoint.

    \b
    Examples:
      holdfast checkpoint verify checkpoints/JOB/chk-12
    """
    from api.cli.checking import print_verification

    if not print_verification(path, quiet, output):
        raise typer.Exit(8)


@app.command()
def gc(
    root: Root,
    grace: Annotated[str, typer.Option("--grace", metavar="DURATION", help="Leave alone what is younger.")] = "1h",
    apply: Annotated[bool, typer.Option("--apply", help="Delete; without this only the plan is printed.")] = False,
    output: Output = None,
) -> None:
    """Find files that no checkpoint needs; delete them only with --apply.

    \b
    Examples:
      holdfast checkpoint gc checkpoints/
      holdfast checkpoint gc s3://bucket/checkpoints --grace 1d --apply
    """
    from checkpoint.storage.gc import apply_gc, plan_gc

    rows = []
    for storage in _jobs(root):
        with storage:
            plan = plan_gc(storage.store, grace=grace)
            deleted = apply_gc(storage.store, plan, grace=grace) if apply else ()
            gone = {orphan.path for orphan in deleted}
            rows += [{"path": storage.store.url_of(orphan.path), "bytes": orphan.size, "reason": orphan.reason,
                      "deleted": orphan.path in gone} for orphan in plan.orphans]
            for sentence in plan.notes:
                out.warn(sentence)
    out.emit_rows(rows, output, name="path", human={"bytes": out.size}, columns=["path", "bytes", "reason", "deleted"])
    total = sum(row["bytes"] for row in rows)
    if apply:
        out.note(f"deleted {sum(row['deleted'] for row in rows)} of {len(rows)} files")
    else:
        out.note(f"{len(rows)} files, {out.size(total)}; nothing was deleted, add --apply to delete them")


@app.command()
def probe(root: Root, output: Output = None) -> None:
    """Prove by doing that a store keeps the promises that exactly-once needs.

    \b
    Examples:
      holdfast checkpoint probe s3://bucket/checkpoints
    """
    from checkpoint.storage.store import FileStore

    with FileStore.at(root, unfenced=True) as store:
        report = store.probe()
    rows = [{"check": item.name, "ok": item.ok, "detail": item.detail} for item in report.checks]
    out.emit_rows(rows, output, name="check", columns=["check", "ok", "detail"])
    if not all(row["ok"] for row in rows):
        raise typer.Exit(7)


def _jobs(root: str) -> list[Any]:
    """The jobs below a folder; the folder of one job is one too."""
    from checkpoint.storage import layout
    from checkpoint.storage.storage import JobStorage, find_jobs
    from checkpoint.storage.urls import split_url
    from statebackend.errors import NotFound

    parent, name = split_url(root.rstrip("/"))
    if layout.is_job_folder(name):
        return [JobStorage(parent or ".", name)]
    found = find_jobs(root)
    if not found:
        raise NotFound("there are no jobs below this folder", path=root, hint="name the folder given as --checkpoint-dir")
    return [JobStorage(root, job) for job in found]
