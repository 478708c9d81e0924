"""`holdfast spark`: savepoints of streaming queries, restoring them, looking at epochs, packing for a cluster."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.output import Output, emit_object, emit_rows, note

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True,
                  help="Work with Spark Structured Streaming checkpoints and jobs.")

Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="The folder or URL given as checkpoint=.")]
Location = Annotated[str, typer.Option("--checkpoint-location", metavar="URL",
                                       help="Spark's checkpointLocation of the query.")]


@app.command()
def savepoint(
    checkpoint: Checkpoint,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder or URL for the savepoint.")],
    checkpoint_location: Location,
    epoch: Annotated[int | None, typer.Option("--epoch", help="A retained batch; the last committed one unless given.")]
    = None,
    format: Annotated[str, typer.Option("--format", help="open or native.")] = "open",
    output: Output = None,
) -> None:
    """Take a savepoint of a query, running or stopped, with Spark's offsets; the query is not paused.

    \b
    Example:
      holdfast spark savepoint s3://bucket/jobs/clicks sp/ --checkpoint-location s3://bucket/checkpoints/clicks
    """
    from spark_integration.query_savepoints import savepoint as take

    url = take(checkpoint, destination, checkpoint_location=checkpoint_location, epoch=epoch, format=format)
    emit_object({"savepoint": url}, output, name="savepoint", show=lambda: note(f"savepoint written to {url}"))


@app.command()
def restore(
    source: Annotated[str, typer.Argument(metavar="SAVEPOINT", help="A savepoint of a query, or with --epoch a query's "
                                                                    "checkpoint folder.")],
    checkpoint_location: Annotated[str, typer.Option("--checkpoint-location", metavar="URL",
                                                     help="A new, empty folder for Spark's checkpoint.")],
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", metavar="URL", help="A new, empty folder for the "
                          "state; beside Spark's, with `-state` appended, unless given.")] = None,
    parallelism: Annotated[int | None, typer.Option("--parallelism", "-p", help="Parallelism of operators that name "
                                                                                "none.")] = None,
    epoch: Annotated[int | None, typer.Option("--epoch", help="Go back to this retained batch of a query.")] = None,
    from_location: Annotated[str | None, typer.Option("--from-location", metavar="URL", help="With --epoch: Spark's "
                             "checkpointLocation of the old query.")] = None,
    output: Output = None,
) -> None:
    """Write a new Spark checkpoint and new state that continue exactly where a savepoint was taken.

    \b
    Examples:
      holdfast spark restore sp/ --checkpoint-location new/ck --checkpoint new/state --parallelism 16
      holdfast spark restore jobs/clicks --epoch 41 --from-location ck/clicks --checkpoint-location new/ck
    """
    from spark_integration.query_savepoints import restore_query, rewind
    from statebackend.errors import InvalidRequest

    state = checkpoint or checkpoint_location.rstrip("/") + "-state"
    if epoch is None:
        query_id = restore_query(source, checkpoint_location=checkpoint_location, checkpoint=state,
                                 parallelism=parallelism)
    elif from_location is None:
        raise InvalidRequest("--epoch needs --from-location, Spark's checkpointLocation of the old query")
    else:
        query_id = rewind(source, from_location, epoch, to_checkpoint=state,
                          to_checkpoint_location=checkpoint_location)
    result = {"query_id": query_id, "checkpoint_location": checkpoint_location, "checkpoint": state}
    emit_object(result, output, name="query_id", show=lambda: note(
        f"start the query with checkpointLocation {checkpoint_location} and checkpoint={state!r}"))


@app.command()
def epochs(
    checkpoint: Checkpoint,
    uid: Annotated[str | None, typer.Option("--operator", help="Only this operator.")] = None,
    output: Output = None,
) -> None:
    """List the retained epochs of a query's operators, newest first.

    \b
    Examples:
      holdfast spark epochs s3://bucket/checkpoints/clicks
    """
    from spark_integration.query_savepoints import list_epochs

    emit_rows(list_epochs(checkpoint, uid), output, name="epoch", title="epochs")


@app.command()
def pack(
    destination: Annotated[str, typer.Argument(metavar="FILE", help="The archive to write, .tar.gz.")] = "holdfast.tar.gz",
    extra: Annotated[list[str] | None, typer.Option("--with", metavar="PACKAGE", help="Another installed package, with "
                                                    "what it needs; repeatable.")] = None,
    output: Output = None,
) -> None:
    """Pack this Python environment's packages that executors need, for spark-submit --archives.

    \b
    Examples:
      holdfast spark pack holdfast.tar.gz
      holdfast spark pack holdfast.tar.gz --with s3fs
    """
    from spark_integration.packing import pack as make

    result: dict[str, Any] = make(destination, extra or ())
    emit_object(result, output, name="archive", show=lambda: note(
        f"{result['archive']}: use --archives {result['archive']}#holdfast and "
        "--conf spark.executorEnv.PYTHONPATH=holdfast"))


@app.command("import")
def import_state(
    checkpoint_location: Annotated[str, typer.Argument(metavar="CHECKPOINT-LOCATION",
                                                       help="The checkpoint of a stopped query with Spark's own state.")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder or URL for the savepoint.")],
    uid: Annotated[str, typer.Option("--operator", help="The uid that the state gets.")],
    operator_id: Annotated[int, typer.Option("--operator-id", help="Spark's number of the stateful operator.")] = 0,
    max_parallelism: Annotated[int, typer.Option("--max-parallelism", help="Key groups of the savepoint.")] = 128,
    output: Output = None,
) -> None:
    """Turn the state of a stopped Spark query into a savepoint, with its offsets. Starts a local Spark session.

    \b
    Examples:
      holdfast spark import s3://bucket/checkpoints/clicks sp/ --operator count
    """
    from spark_integration.importing import import_state as run
    from spark_integration.session import spark_session

    session = spark_session("local[*]", "holdfast import")
    try:
        result = run(session, checkpoint_location, destination, uid=uid, operator_id=operator_id,
                     max_parallelism=max_parallelism)
    finally:
        session.stop()
    emit_object(result, output, name="savepoint", show=lambda: note(
        f"{result['rows']} rows of {', '.join(result['states'])} written to {result['savepoint']}"))
