from __future__ import annotations

import threading

from infinity_bento.batching.ticket import Ticket
from infinity_bento.core import Item, Result, Task, Usage
from infinity_bento.errors import InvalidInput


def items(count: int) -> list[Item]:
    return [Item(Task.EMBED, text=str(number)) for number in range(count)]


def test_done_is_called_once_after_the_last_item_in_any_order() -> None:
    calls: list[int] = []
    ticket = Ticket(items(3), lambda: calls.append(1))
    error = InvalidInput("no")
    ticket.resolve(2, Result("c", Usage(1)))
    ticket.resolve(0, error)
    assert calls == []
    ticket.resolve(1, Result("b", Usage(1)))
    assert calls == [1]
    outcomes = ticket.outcomes()
    assert outcomes[0] is error
    assert [outcome.output for outcome in outcomes[1:] if isinstance(outcome, Result)] == ["b", "c"]


def test_the_first_outcome_of_an_item_wins() -> None:
    ticket = Ticket(items(1), lambda: None)
    ticket.resolve(0, Result("first", Usage(1)))
    ticket.resolve_rest(InvalidInput("late"))
    (outcome,) = ticket.outcomes()
    assert isinstance(outcome, Result)
    assert outcome.output == "first"


def test_many_threads_resolve_one_ticket() -> None:
    calls: list[int] = []
    ticket = Ticket(items(400), lambda: calls.append(1))
    threads = [
        threading.Thread(
            target=lambda part: [ticket.resolve(index, Result(index, Usage(1))) for index in range(part, 400, 8)],
            args=(part,),
        )
        for part in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert [outcome.output for outcome in ticket.outcomes() if isinstance(outcome, Result)] == list(range(400))
