"""What the supervisor learns of BentoML's own command, and what it says before the workers start."""

from __future__ import annotations

import logging

import click
import pytest
from bentoml.exceptions import BentoMLException

from infinity_bento import announcing
from infinity_bento.listening import Address
from infinity_bento.settings import resolve
from infinity_bento.sources import HANDED_ON_VARIABLE


@click.command()
@click.option("--host", envvar="BENTOML_HOST")
@click.option("--port", type=int, envvar="BENTOML_PORT")
@click.option("--ssl-certfile")
def serve(**options: object) -> None:
    """A command with the flags of ``bentoml serve``."""


def context(*words: str) -> click.Context:
    return serve.make_context("serve", list(words))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """What is logged."""
    records: list[logging.LogRecord] = []
    logger = logging.Logger("announcing")
    logger.addFilter(lambda record: records.append(record) is not None)
    monkeypatch.setattr(announcing, "logger", logger)
    return records


def test_nobody_knows_the_address_without_the_command() -> None:
    assert announcing.told_address() is None
    with click.Context(click.Command("build")):
        assert announcing.told_address() is None


def test_flags_and_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    with context("--host", "127.0.0.1", "--port", "81"):
        assert announcing.told_address() == Address("127.0.0.1", 81)
    with context("--ssl-certfile", "x"):
        assert announcing.told_address() == Address("0.0.0.0", 3000, "https")
    monkeypatch.setenv("BENTOML_PORT", "82")
    with context() as made:
        assert announcing.told_address() == Address("0.0.0.0", 82)
        assert made.params["host"] is None
    with context("--host", "localhost"), pytest.raises(BentoMLException, match="--host is 'localhost'; it must be an"):
        announcing.told_address()


def test_the_real_command_has_these_flags() -> None:
    from bentoml_cli.serve import build_serve_command

    names = {parameter.name for parameter in build_serve_command().commands["serve"].params}
    assert {"host", "port", "ssl_certfile"} <= names


def test_an_open_server_is_announced_with_a_warning(lines, monkeypatch) -> None:
    monkeypatch.setenv("BENTOML_PORT", "82")
    with context("--host", "0.0.0.0"):
        announcing.announce(resolve(), Address("0.0.0.0", 82))
    block, warning, loading = lines
    assert "port  82  environment BENTOML_PORT" in block.getMessage()
    assert warning.levelno == logging.WARNING and "--host 127.0.0.1" in warning.getMessage()
    assert "http://127.0.0.1:82/readyz" in loading.getMessage() and "listening" not in loading.getMessage()


def test_the_remedy_is_that_of_the_command_in_use(lines, monkeypatch) -> None:
    monkeypatch.setenv(HANDED_ON_VARIABLE, "port")
    announcing.announce(resolve(), Address("0.0.0.0", 82))
    assert "--hostname 127.0.0.1" in lines[1].getMessage()


def test_no_warning_with_a_key_or_for_this_machine_only(lines) -> None:
    announcing.announce(resolve({"api-key": "sesame"}), Address("0.0.0.0", 82))
    announcing.announce(resolve(), Address("127.0.0.1", 82))
    announcing.announce(resolve(), None)
    assert [line.levelno for line in lines] == [logging.INFO] * 6
    assert "sesame" not in "".join(line.getMessage() for line in lines)
