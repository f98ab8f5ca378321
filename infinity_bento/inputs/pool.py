"""Threads that tokenise. The tokenizers library lets go of the GIL, so the event loop stays responsive meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from infinity_bento.core import Encoded, Item
from infinity_bento.errors import InfinityError, InvalidInput
from infinity_bento.inputs.tokenization import TextTokenizer
from infinity_bento.inputs.tokenizer_files import first_line

# Texts of one encode_batch call: enough to amortise the call, few enough that no request waits for a long one.
MAX_TEXTS_PER_CALL = 64

# Up to so many characters are encoded at once, where they arrive: a fifth of a millisecond, which is less than a thread
# costs that must first be woken, and then shares Python's lock with the one that woke it.
INLINE_CHARACTERS = 1024

Encodings = list[Encoded | InfinityError]
OnEncoded = Callable[[Encodings, float], None]


class TokenizerPool:
    """Threads that tokenise; waiting requests are taken together and encoded in one call.

    Args:
        tokenizer: What the threads run.
        workers: How many threads.
        name: Of the model, for the threads' names.
    """

    def __init__(self, tokenizer: TextTokenizer, workers: int, name: str = "") -> None:
        self.tokenizer = tokenizer
        self._jobs: queue.SimpleQueue[tuple[Sequence[Item], OnEncoded] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenize-{name}-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, items: Sequence[Item], on_encoded: OnEncoded) -> None:
        """Tokenise ``items``; ``on_encoded(encodings, seconds)`` is called in a worker thread, or here if short."""
        if is_short(items):
            self._encode([(items, on_encoded)])
        else:
            self._jobs.put((items, on_encoded))

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            texts = len(job[0])
            closing = False
            while texts < MAX_TEXTS_PER_CALL:
                try:
                    following = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    closing = True
                    break
                jobs.append(following)
                texts += len(following[0])
            self._encode(jobs)
            if closing:
                return

    def _encode(self, jobs: Sequence[tuple[Sequence[Item], OnEncoded]]) -> None:
        started = time.perf_counter()
        try:
            encodings = self.tokenizer.encode([item for items, _ in jobs for item in items])
        except Exception:  # the tokenizer's own failure on one text must not end the thread
            encodings = self._one_by_one(jobs)
        seconds = time.perf_counter() - started
        start = 0
        for items, on_encoded in jobs:
            on_encoded(encodings[start : start + len(items)], seconds)
            start += len(items)

    def _one_by_one(self, jobs: Sequence[tuple[Sequence[Item], OnEncoded]]) -> Encodings:
        """Find the item that the tokenizer cannot take; the others are unharmed."""
        encodings: Encodings = []
        for items, _ in jobs:
            for item in items:
                try:
                    encodings += self.tokenizer.encode([item])
                except Exception as error:
                    encodings.append(InvalidInput(f"The tokenizer failed on this input: {first_line(error)}"))
        return encodings


def is_short(items: Sequence[Item]) -> bool:
    """Whether encoding these items is quicker than handing them over."""
    characters = 0
    for item in items:
        if item.text is None or item.decision is not None:
            return False
        characters += len(item.text) + len(item.text_pair or "")
        if characters > INLINE_CHARACTERS:
            return False
    return True
