"""`holdfast serve`: the REST API and the web page on an embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statebackend.errors import InvalidRequest, Unavailable

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8081,
    root: Annotated[list[str] | None, typer.Option(
        "--root", metavar="URL", help="A folder that the service may read and write; may be repeated.")] = None,
    database: Annotated[Path | None, typer.Option(help="SQLite file of the service's own records.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Lines of role:sha256-hex[:name].")] = None,
    jobs_dir: Annotated[list[Path] | None, typer.Option(
        "--jobs-dir", help="A folder whose job files administrators may start; may be repeated.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(
        "--allow-host", help="A Host name under which a proxy in front is reached; may be repeated.")] = None,
    lost_after: Annotated[str, typer.Option(help="A job is shown as lost when it is silent for so long.")] = "15s",
    new_token: Annotated[str | None, typer.Option(
        "--new-token", metavar="ROLE", help="Print a new token (viewer, operator, admin) and its line, then end.")] = None,
) -> None:
    """Serve the REST API and the web page.

    \b
    Examples:
      holdfast serve                                  loopback, ./holdfast-data as root
      holdfast serve --root s3://bucket/jobs --root checkpoints/ --port 8081
      holdfast serve --new-token operator             prints a token and the line for --token-file
      holdfast serve --host 0.0.0.0 --token-file tokens --certificate c.pem --certificate-key k.pem
    """
    if new_token is not None:
        _print_token(new_token)
        return
    from api.rest.settings import ServiceSettings
    from statebackend.durations import duration_ms

    roots = tuple(root or [])
    if not roots:
        Path("holdfast-data").mkdir(exist_ok=True)
        roots = ("holdfast-data",)
    chosen_port = port or _free_port(host)
    run_service(ServiceSettings(
        roots=roots, database=database or Path("holdfast-service.db"), host=host, port=chosen_port,
        token_file=token_file, certificate=certificate, certificate_key=certificate_key,
        jobs_dirs=tuple(jobs_dir or []), allowed_hosts=tuple(allow_host or []), lost_after_ms=duration_ms(lost_after)))


def run_service(settings: object) -> None:
    """Serve until a signal comes."""
    import logging

    import uvicorn

    from api.rest.app import create_app
    from api.rest.settings import ServiceSettings

    assert isinstance(settings, ServiceSettings)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    scheme = "https" if settings.certificate else "http"
    app_ = create_app(settings)
    typer.echo(f"Holdfast serves {', '.join(settings.roots)} at {scheme}://{settings.host}:{settings.port}/", err=True)
    try:
        uvicorn.run(app_, host=settings.host, port=settings.port, log_level="warning", access_log=False,
                    ssl_certfile=settings.certificate, ssl_keyfile=settings.certificate_key, timeout_graceful_shutdown=5)
    except OSError as error:
        raise Unavailable(f"can't listen on {settings.host}:{settings.port}: {error}",
                          hint="choose another --port") from error


def _print_token(name: str) -> None:
    from api.rest.security import Role
    from api.rest.security import new_token as make

    if name.upper() not in Role.__members__:
        raise InvalidRequest(f"there is no role {name!r}", hint="viewer, operator or admin")
    token, line = make(Role[name.upper()])
    typer.echo(f"token (shown once): {token}\nline for the token file: {line}")


def _free_port(host: str) -> int:
    import socket

    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
