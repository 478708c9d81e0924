"""What the service is told at its start, checked before it binds a port."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from statebackend.errors import InvalidRequest


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of one service. The limits are what one request may cost; each is an error that says so when passed.

    `history` checkpoints of a job, `kept_jobs` ended jobs and `kept_records` finished triggers and operations are kept.
    """

    roots: tuple[str, ...]
    database: Path
    host: str = "127.0.0.1"
    port: int = 8081
    token_file: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    jobs_dirs: tuple[Path, ...] = ()
    lost_after_ms: int = 15_000
    max_body_bytes: int = 1 << 20
    max_rows: int = 100_000
    max_page: int = 1_000
    query_seconds: float = 20.0
    max_operations: int = 2
    max_heavy_requests: int = 4
    history: int = 100
    kept_jobs: int = 1_000
    kept_records: int = 10_000
    allowed_hosts: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.roots:
            raise InvalidRequest("the service needs at least one root", hint="--root URL")
        if not self.is_loopback and self.token_file is None:
            raise InvalidRequest(
                f"refusing to listen on {self.host} without tokens", hint="give --token-file (see `holdfast serve --help`), "
                "or listen on 127.0.0.1")
        if not self.is_loopback and self.certificate is None and not self.allowed_hosts:
            raise InvalidRequest(
                f"refusing to listen on {self.host} without TLS", hint="give --certificate and --certificate-key, or "
                "--allow-host NAME for each name under which a TLS proxy in front is reached")
        for folder in self.jobs_dirs:
            if not folder.is_dir():
                raise InvalidRequest("a jobs folder does not exist", path=str(folder))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
