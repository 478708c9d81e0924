"""`holdfast savepoint ...`: list, look into, query, compare, change and move savepoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli import output as out
from api.cli.output import Format, Output

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, add_completion=False)

Path = Annotated[str, typer.Argument(metavar="SAVEPOINT", help="Folder or URL of a savepoint or checkpoint.")]
Source = Annotated[str, typer.Argument(metavar="SRC", help="Folder or URL of a savepoint or checkpoint.")]
Dest = Annotated[str, typer.Argument(metavar="DEST", help="New folder or URL; refused if it exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on stderr.")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it; without this only the plan is printed.")]


@app.callback()
def group() -> None:
    """List, inspect, query, compare, edit, rescale and convert savepoints."""


@app.command("list")
def list_(
    url: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder or URL to look below.")] = ".",
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="List checkpoints too.")] = False,
    output: Output = None,
) -> None:
    """List the savepoints below a folder, oldest first.

    \b
    Examples:
      holdfast savepoint list savepoints/
      holdfast savepoint list s3://bucket/jobs --checkpoints -o name
    """
    from savepoint.manage import list_savepoints

    rows = [{"path": item.path, "kind": item.kind, "format": item.format, "job": item.job_name,
             "checkpoint": item.checkpoint_id, "completed": item.completed_timestamp, "problem": item.problem}
            for item in list_savepoints(url, checkpoints=checkpoints)]
    out.emit_rows(rows, output, name="path", human={"completed": out.when},
                  columns=["path", "kind", "format", "job", "checkpoint", "completed", "problem"])


@app.command()
def inspect(
    path: Path,
    operator: Annotated[str | None, typer.Option("--operator", metavar="UID", help="Only this operator.")] = None,
    key_groups: Annotated[bool, typer.Option("--key-groups", help="Rows and bytes of every key group.")] = False,
    output: Output = None,
) -> None:
    """Show operators, states, types, sizes, the spread over key groups and subtasks, and the largest keys.

    Reads metadata only, so it is quick whatever the size.

    \b
    Examples:
      holdfast savepoint inspect sp/
      holdfast savepoint inspect sp/ --operator count --key-groups -o csv
    """
    import gc

    import savepoint
    from api.cli.inspection import describe, show_description

    with savepoint.open(path) as opened:
        gc.freeze()  # metadata can be a million objects that stay to the end: no collection needs to walk them
        if operator is not None:
            opened.entry(operator)
        if key_groups:
            uids = [operator] if operator else [info.uid for info in opened.operators() if info.key_type]
            rows = [{"operator": uid, **row} for uid in uids for row in opened.key_groups(uid).to_pylist()]
            out.emit_rows(rows, output, name="key_group", human={"bytes": out.size})
            return
        document = describe(opened, operator)
    out.emit_object(document, output, name="path", show=lambda: show_description(document))


@app.command()
def read(
    path: Path,
    state: Annotated[str, typer.Argument(metavar="OPERATOR.STATE",
                                             help="The state to read, or an edge with records in flight.")],
    key: Annotated[list[str] | None, typer.Option("--key", "-k", help="Only this key (JSON or text); repeatable.")] = None,
    key_group: Annotated[str | None, typer.Option("--key-group", metavar="N|A-B", help="Only these key groups.")] = None,
    where: Annotated[str | None, typer.Option("--where", metavar="SQL", help="Only rows that fulfil this.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="A,B", help="Only these columns.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, help="At most so many rows.")] = None,
    output: Output = None,
) -> None:
    """Print the rows of a state as a table, JSON lines, CSV, Parquet or Arrow.

    \b
    Examples:
      holdfast savepoint read sp/ count.total -o jsonl
      holdfast savepoint read sp/ count.total --key alice
      holdfast savepoint read sp/ "clicks->count#0"
      holdfast savepoint read sp/ count.total --where "value > 100" -o parquet > hot.parquet
    """
    import savepoint
    from savepoint.lookup import near_keys
    from savepoint.naming import parse_key_groups, split_name
    from savepoint.values import from_text, to_plain
    from statebackend.errors import NotFound

    with savepoint.open(path) as opened:
        if "->" in state and state not in opened.state_names():
            out.emit_batches(opened.in_flight(state).to_reader(), output, limit=limit)
            return
        uid, name = split_name(opened, state)
        keys = [from_text(text, opened.key_type(uid)) for text in key] if key else None
        reader = opened.read(uid, name, keys=keys, key_groups=parse_key_groups(key_group) if key_group else None,
                             where=where, columns=columns.split(",") if columns else None)
        printed = out.emit_batches(reader, output, limit=limit, types=opened.column_types(uid, name))
        if keys is not None and printed == 0 and limit != 0:
            raise NotFound(f"there is no key {to_plain(keys[0])!r}", operator=uid, state=name,
                           hint=near_keys(opened, uid, name, keys[0]))


@app.command()
def query(
    path: Path,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A SELECT over OPERATOR.STATE tables.")],
    output: Output = None,
) -> None:
    """Run SQL (DuckDB) over the states as tables. Read-only, and confined to this savepoint.

    \b
    Examples:
      holdfast savepoint query sp/ "select key, value from count.total order by value desc limit 10"
      holdfast savepoint query sp/ 'select key_group, count(*) n from count.total group by all order by n desc' -o csv
    """
    import savepoint

    with savepoint.open(path) as opened:
        out.emit_batches(opened.query(sql), output)


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="The first savepoint or checkpoint.")],
    right: Annotated[str, typer.Argument(metavar="B", help="The second.")],
    totals: Annotated[bool, typer.Option("--totals", help="Only the totals by state.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, show_default=False,
                                              help="At most so many entries; 1000 in a table, else all.")] = None,
    quiet: Quiet = False,
    output: Output = None,
) -> None:
    """Compare two savepoints: totals first, then each added, removed and changed entry.

    Exits with 0 where they are the same, 1 where they differ, 2 on an error. In formats other than table the
    entries go to stdout and the totals to stderr; with --totals the totals go to stdout.

    \b
    Examples:
      holdfast savepoint diff before/ after/
      holdfast savepoint diff before/ after/ --totals -o json
    """
    from itertools import islice

    from savepoint.diff import changes, compare
    from statebackend.errors import HoldfastError

    try:
        with out.quietly(quiet), out.progress("comparing") as progress:
            found = compare(left, right, progress=progress)
    except HoldfastError as error:
        out.error(str(error))
        raise typer.Exit(2) from None  # as of every diff: 1 says that they differ, so each error is 2
    rows = [{"operator": item.uid, "state": item.state, "added": item.added, "removed": item.removed,
             "changed": item.changed, "unchanged": item.unchanged, "note": item.note} for item in found.states]
    table = out.chosen(output) is Format.TABLE
    for sentence in found.operators:
        out.note(sentence)
    if totals or table:
        out.emit_rows(rows, output, name="state", title="totals" if table else None)
    else:
        for row in rows:
            out.note("{operator}.{state}: {added} added, {removed} removed, {changed} changed, {unchanged} unchanged"
                     .format(**row) + (f" ({row['note']})" if row["note"] else ""))
    if not totals:
        only = {(item.uid, item.state) for item in found.states if item.added or item.removed or item.changed}
        most = 1000 if table and limit is None else limit
        listed = islice(changes(left, right, only), most) if only else iter(())
        printed = out.emit_rows(listed, output, name="key", title="entries" if table else None, empty=not table)
        if sum(item.added + item.removed + item.changed for item in found.states) > printed:
            out.note(f"first {printed} entries; use --limit for more")
    raise typer.Exit(1 if found else 0)


@app.command()
def edit(
    source: Source,
    destination: Annotated[str | None, typer.Argument(metavar="[DEST]", help="New folder; needed with --apply.")] = None,
    patch: Annotated[str | None, typer.Option("--patch", "-p", metavar="FILE",
                                              help="JSON or JSON lines; - is stdin.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="OPERATOR.STATE:KEY=VALUE",
                                                   help="Set an entry; repeatable.")] = None,
    delete: Annotated[list[str] | None, typer.Option("--delete", metavar="OPERATOR.STATE:KEY",
                                                     help="Delete an entry; repeatable.")] = None,
    apply: Apply = False,
    quiet: Quiet = False,
    output: Output = None,
) -> None:
    """Change entries, into a new savepoint: prints the plan as a diff, and writes only with --apply.

    \b
    Examples:
      holdfast savepoint edit sp/ --set count.total:alice=7
      holdfast savepoint edit sp/ --set count._timers_event:alice=1700000000000 --set source.offsets:0/1=17
      holdfast savepoint edit sp/ fixed/ --patch fix.jsonl --delete count.total:bob --apply
    """
    import savepoint
    from savepoint.naming import parse_assignment, parse_target
    from savepoint.patch import read_patch
    from statebackend.errors import InvalidRequest

    if apply and destination is None:
        raise InvalidRequest("an edit is written to a new folder", hint="name one: holdfast savepoint edit SRC DEST --apply")
    operations = read_patch(_text_of(patch), path=patch) if patch else []
    with savepoint.open(source) as opened:
        operations += [parse_assignment(opened, text) for text in set_ or ()]
        operations += [parse_target(opened, text) for text in delete or ()]
    with savepoint.Edit(source, operations) as planned:
        out.emit_rows(planned.plan(), output, name="key", title="plan" if out.chosen(output) is Format.TABLE else None)
        if not apply or destination is None:
            out.note("nothing was written; add DEST and --apply to write the edited savepoint")
            return
        with out.quietly(quiet), out.progress("writing", "bytes") as progress:
            planned.write(destination, progress=progress)
    out.note(f"wrote {destination}")


@app.command()
def transform(
    source: Source,
    destination: Dest,
    rename_operator: Annotated[list[str] | None, typer.Option("--rename-operator", metavar="OLD=NEW")] = None,
    drop_operator: Annotated[list[str] | None, typer.Option("--drop-operator", metavar="UID")] = None,
    rename_state: Annotated[list[str] | None, typer.Option("--rename-state", metavar="OPERATOR.OLD=NEW")] = None,
    drop_state: Annotated[list[str] | None, typer.Option("--drop-state", metavar="OPERATOR.STATE")] = None,
    change_type: Annotated[list[str] | None, typer.Option("--change-type", metavar="OPERATOR.STATE=TYPE")] = None,
    map_: Annotated[list[str] | None, typer.Option("--map", metavar="OPERATOR.STATE=FILE.py:FUNCTION",
                    help="A function from a dict of an entry's columns to one, or to None.")] = None,
    strip_expired: Annotated[bool, typer.Option("--strip-expired", help="Leave out what TTL has expired.")] = False,
    parallelism: Annotated[int | None, typer.Option("--parallelism", min=1)] = None,
    max_parallelism: Annotated[int | None, typer.Option("--max-parallelism", min=1)] = None,
    quiet: Quiet = False,
) -> None:
    """Write a changed copy: rename, drop, retype or map states; strip expired entries; regroup keys.

    \b
    Examples:
      holdfast savepoint transform sp/ new/ --rename-operator count=counts --drop-state count.old
      holdfast savepoint transform sp/ new/ --change-type count.total=float --strip-expired
      holdfast savepoint transform sp/ new/ --map count.total=fix.py:halve
    """
    import savepoint
    from api.cli.functions import load_function
    from savepoint.naming import parse_type, split_name

    change = savepoint.Transform(source)
    with savepoint.open(source) as opened:
        for old, new in _pairs(rename_operator):
            change.rename_operator(old, new)
        for uid in drop_operator or ():
            change.drop_operator(uid)
        for old, new in _pairs(rename_state):
            change.rename_state(*split_name(opened, old), new)
        for name in drop_state or ():
            change.drop_state(*split_name(opened, name))
        for name, kind in _pairs(change_type):
            change.change_type(*split_name(opened, name), parse_type(kind))
        for name, function in _pairs(map_):
            change.map_entries(*split_name(opened, name), load_function(function))
    if strip_expired:
        change.strip_expired()
    if parallelism is not None:
        change.set_parallelism(parallelism)
    if max_parallelism is not None:
        change.set_max_parallelism(max_parallelism)
    with out.quietly(quiet), out.progress("transforming") as progress:
        change.write(destination, progress=progress)
    out.note(f"wrote {destination}")


@app.command()
def rescale(
    source: Source,
    destination: Dest,
    parallelism: Annotated[int | None, typer.Option("--parallelism", min=1, help="Cut files for so many subtasks.")] = None,
    max_parallelism: Annotated[int | None, typer.Option("--max-parallelism", min=1,
                                                        help="Group keys anew into so many key groups.")] = None,
    quiet: Quiet = False,
) -> None:
    """Re-cut a savepoint for another parallelism or max parallelism, without a running job.

    A restore takes any parallelism by itself; only another max parallelism needs this.

    \b
    Examples:
      holdfast savepoint rescale sp/ wide/ --parallelism 16
      holdfast savepoint rescale sp/ wide/ --max-parallelism 1024
    """
    import savepoint

    with out.quietly(quiet), out.progress("rescaling") as progress:
        savepoint.rescale_savepoint(source, destination, parallelism=parallelism, max_parallelism=max_parallelism,
                                    progress=progress)
    out.note(f"wrote {destination}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT-OR-SAVEPOINT", help="What to convert; any format.")],
    destination: Dest,
    format: Annotated[str, typer.Option("--format", "-f", metavar="open|native", help="Format to write.")] = "open",
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint or savepoint as an open (Parquet) or native savepoint that stands alone.

    \b
    Examples:
      holdfast savepoint convert checkpoints/JOB/chk-12 sp/
      holdfast savepoint convert sp/ s3://bucket/sp --format native
    """
    import savepoint

    with out.quietly(quiet), out.progress("converting", "rows" if format == "open" else "bytes") as progress:
        savepoint.convert_savepoint(source, destination, format=format, progress=progress)
    out.note(f"wrote {destination}")


@app.command()
def check(
    path: Path,
    flow: Annotated[str, typer.Argument(metavar="job.py:flow", help="The job to hold against it.")],
    uid: Annotated[list[str] | None, typer.Option("--map-uid", metavar="OLD=NEW", help="Stored uid to the flow's.")] = None,
    allow_non_restored_state: Annotated[bool, typer.Option("--allow-non-restored-state",
                                                           help="State without an operator is no error.")] = False,
    parallelism: Annotated[list[str] | None, typer.Option("--parallelism", metavar="N|UID=N")] = None,
    output: Output = None,
) -> None:
    """Dry run of a restore: what would be restored, migrated, dropped or refused, and why. No record is processed.

    \b
    Examples:
      holdfast savepoint check sp/ job.py:flow
      holdfast savepoint check sp/ job.py:flow --map-uid count=counts -o json
    """
    from api.cli.checking import print_check

    if not print_check(path, flow, uid, allow_non_restored_state, parallelism, output):
        raise typer.Exit(5)


@app.command()
def verify(path: Path, quiet: Quiet = False, output: Output = None) -> None:
    """Check every checksum, reference, schema, row count, order and key group.

    \b
    Examples:
      holdfast savepoint verify sp/
      holdfast savepoint verify s3://bucket/jobs/JOB/chk-12 -o json
    """
    from api.cli.checking import print_verification

    if not print_verification(path, quiet, output):
        raise typer.Exit(8)


@app.command()
def copy(source: Source, destination: Dest, quiet: Quiet = False) -> None:
    """Copy a savepoint, verified on the way; a checkpoint becomes a native savepoint that stands alone.

    \b
    Examples:
      holdfast savepoint copy sp/ s3://bucket/sp
      holdfast savepoint copy s3://bucket/sp restored/
    """
    import savepoint

    with out.quietly(quiet), out.progress("copying", "bytes") as progress:
        savepoint.copy_savepoint(source, destination, progress=progress)
    out.note(f"wrote {destination}")


@app.command()
def dispose(path: Path, apply: Apply = False, output: Output = None) -> None:
    """Remove a savepoint: prints what would go, and removes it only with --apply.

    \b
    Examples:
      holdfast savepoint dispose sp/
      holdfast savepoint dispose sp/ --apply
    """
    import savepoint

    plan = savepoint.plan_disposal(path)
    out.emit_rows([{"path": plan.url, "files": plan.files, "bytes": plan.size, "removed": apply}], output, name="path",
                  human={"bytes": out.size})
    if apply:
        plan.apply()
    else:
        out.note("nothing was removed; add --apply to remove it")


@app.command()
def bootstrap(
    destination: Dest,
    data: Annotated[str, typer.Option("--from", metavar="FILE", help="Parquet, CSV, JSON lines or Arrow; any URL.")],
    state: Annotated[str, typer.Option("--state", metavar="OPERATOR.STATE", help="The state to build.")],
    key: Annotated[str, typer.Option("--key", metavar="COLUMN[,COLUMN]",
                                     help="Column of keys; several make a tuple.")] = "key",
    value: Annotated[str | None, typer.Option("--value", metavar="COLUMN[,COLUMN]",
                                              help="Column of values; several make a record.")] = None,
    map_key: Annotated[str, typer.Option("--map-key", metavar="COLUMN",
                                         help="Column of map keys (kind map).")] = "map_key",
    kind: Annotated[str, typer.Option("--kind", metavar="value|list|map")] = "value",
    key_type: Annotated[str | None, typer.Option("--key-type", metavar="TYPE",
                                                 help="Told by the data unless given.")] = None,
    value_type: Annotated[str | None, typer.Option("--value-type", metavar="TYPE")] = None,
    job_name: Annotated[str, typer.Option("--job-name")] = "bootstrap",
    parallelism: Annotated[int, typer.Option("--parallelism", min=1)] = 1,
    max_parallelism: Annotated[int | None, typer.Option("--max-parallelism", min=1)] = None,
    quiet: Quiet = False,
) -> None:
    """Build a savepoint from a table: the state that a new job starts with.

    \b
    Examples:
      holdfast savepoint bootstrap sp/ --from users.parquet --state count.total --key user --value clicks
      holdfast savepoint bootstrap sp/ --from seen.csv --state dedup.seen --kind map --key user --map-key url --value at
    """
    from savepoint.tables import bootstrap_table

    with out.quietly(quiet), out.progress("writing") as progress:
        bootstrap_table(destination, data, state, kind=kind, key=_columns(key), value=_columns(value), map_key=map_key,
                        key_type=key_type, value_type=value_type, job_name=job_name, parallelism=parallelism,
                        max_parallelism=max_parallelism, progress=progress)
    out.note(f"wrote {destination}")


def _columns(text: str | None) -> Any:
    if text is None:
        return None
    names = text.split(",")
    return names[0] if len(names) == 1 else names


def _pairs(texts: list[str] | None) -> list[tuple[str, str]]:
    from statebackend.errors import InvalidRequest

    found = []
    for text in texts or ():
        left, equals, right = text.partition("=")
        if not (left and equals and right):
            raise InvalidRequest(f"{text!r} is not of the form A=B")
        found.append((left, right))
    return found


def _text_of(path: str) -> str:
    import sys
    from pathlib import Path

    from statebackend.errors import NotFound

    if path == "-":
        return sys.stdin.read()
    if not Path(path).is_file():
        raise NotFound("there is no such patch file", path=path)
    return Path(path).read_text()
