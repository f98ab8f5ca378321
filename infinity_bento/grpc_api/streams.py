"""Streams of requests: many messages at work, their answers in order, nothing left behind when a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from infinity_bento.errors import NotReady

Q = TypeVar("Q")
R = TypeVar("R")

# A client that is still sending when its stream ends may see a failed write instead of the reason (Python's does). So
# what it is about to send is read and dropped first; who has more than that to send gets the status all the same.
LINGER_SECONDS = 0.25


class Streams:
    """The streams of one server.

    Args:
        window: Most messages of one stream that are read and not answered yet. The transport holds back the rest.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._readers: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def answers(
        self, messages: AsyncIterator[Q], answer: Callable[[Q], Coroutine[Any, Any, R]]
    ) -> AsyncGenerator[R, None]:
        """The answer to each message, in order.

        Close it (``contextlib.aclosing``): whatever is still at work is cancelled then, and so it is when an answer
        raises, which ends the stream at that message.

        Args:
            messages: Of the client.
            answer: Called in the order of the messages, awaited in any.

        Raises:
            NotReady: After the answers to what was read, if the server stops.
        """
        slots = asyncio.Semaphore(self._window)
        at_work: asyncio.Queue[asyncio.Task[R] | None] = asyncio.Queue()
        failed = False

        async def read() -> None:
            try:
                await slots.acquire()
                async for message in messages:
                    if failed:
                        continue
                    at_work.put_nowait(asyncio.create_task(answer(message)))
                    await slots.acquire()
            finally:
                at_work.put_nowait(None)

        reader = asyncio.create_task(read())
        self._readers.add(reader)
        if self._stopping:
            reader.cancel()
        try:
            while (task := await at_work.get()) is not None:
                yield await task
                slots.release()
            await asyncio.wait([reader])
            if reader.cancelled() and self._stopping:
                raise NotReady("The server is stopping: open the stream again on another replica, from here on.")
            reader.result()  # what went wrong while reading, if anything did
        except Exception:
            failed = True
            slots.release()
            await asyncio.wait([reader], timeout=LINGER_SECONDS)
            raise
        finally:
            self._readers.discard(reader)
            await _cancelled(reader, at_work)

    def stop(self) -> None:
        """Read no further message; what was read is still answered."""
        self._stopping = True
        for reader in self._readers:
            reader.cancel()


async def _cancelled(reader: asyncio.Task[None], at_work: asyncio.Queue[asyncio.Task[R] | None]) -> None:
    """Cancel the reader and everything that nobody will ask for."""
    reader.cancel()
    tasks: list[asyncio.Task[Any]] = [reader]
    while not at_work.empty():
        task = at_work.get_nowait()
        if task is not None:
            task.cancel()
            tasks.append(task)
    await asyncio.gather(*tasks, return_exceptions=True)
