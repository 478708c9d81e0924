"""Reports of jobs are written together: those of a few milliseconds in one transaction, by a thread of its own.

A report is answered when it is committed. The loop that answers requests never waits for the disk.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from api.rest.records import Beat, Command
from api.rest.registry import Registry

GATHER_SECONDS = 0.05
"""A job does not mind waiting; a transaction costs as much as the reports in it."""


class Beats:
    """Gathers reports and writes them in the order they came."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="beats")
        self._waiting: list[tuple[Beat, asyncio.Future[list[Command]]]] = []

    async def add(self, beat: Beat) -> list[Command]:
        """Write a report; the commands for its job."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Command]] = loop.create_future()
        self._waiting.append((beat, answer))
        if len(self._waiting) == 1:
            loop.call_later(GATHER_SECONDS, self._hand_over, loop)
        return await answer

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting, []
        self._writer.submit(self._write, loop, batch)

    def _write(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[Beat, asyncio.Future[list[Command]]]]) -> None:
        answers: list[list[Command] | Exception]
        try:
            answers = list(self._registry.heartbeats([beat for beat, _ in batch]))
        except Exception as error:
            answers = [error] * len(batch)
        loop.call_soon_threadsafe(_settle, [future for _, future in batch], answers)

    def close(self) -> None:
        self._writer.shutdown()


def _settle(futures: list[asyncio.Future[list[Command]]], answers: list[list[Command] | Exception]) -> None:
    for future, answer in zip(futures, answers):
        if future.done():  # its client went away
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
