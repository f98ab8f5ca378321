"""The address of a server: free or not, what to type, who else can reach it, and what BentoML's own flags change."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from infinity_bento.errors import ConfigError
from infinity_bento.listening import Address, exposure, leave_url, read_url, require_free, settings_at
from infinity_bento.settings import Origin, Source, resolve
from infinity_bento.telemetry.startup import settings_block


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (Address("127.0.0.1", 81), "http://127.0.0.1:81"),
        (Address("0.0.0.0", 3000), "http://127.0.0.1:3000"),
        (Address("::", 3000), "http://[::1]:3000"),
        (Address("fd00::5", 443, "https"), "https://[fd00::5]:443"),
    ],
)
def test_the_url_can_be_connected_to(address: Address, url: str) -> None:
    assert address.url == url


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_with_address_port_and_remedy(taken: int, host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_free(Address(host, taken))
    assert f"Port {taken} of {host} is in use by another process; choose another one with --port" in str(caught.value)


def test_a_free_port_is_taken_only_for_a_moment(taken: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    require_free(Address("127.0.0.1", port))
    require_free(Address("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is none of this machine's; listen on 0\.0\.0\.0"):
        require_free(Address("192.0.2.1", 3000))


def test_a_port_that_needs_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match="Port 80 needs privileges"):
        require_free(Address("127.0.0.1", 80))


@pytest.mark.parametrize(
    ("host", "has_key", "is_open"),
    [
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.7", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("::1", False, False),
    ],
)
def test_a_server_open_to_others_says_so(host: str, has_key: bool, is_open: bool) -> None:
    text = exposure(Address(host, 3000), has_key=has_key, flag="--host")
    assert (text is not None) == is_open
    if text is not None:
        assert "\n" not in text
        for part in ("port 3000", "no API key", "--host 127.0.0.1", "--api-key"):
            assert part in text
        assert ("all interfaces" in text) == (host != "10.0.0.7")


def test_bentomls_flags_win_and_are_shown() -> None:
    settings = resolve({}, {"INFINITY_PORT": "81"})
    origins = {
        "hostname": Origin(Source.FLAG, "--host"),
        "port": Origin(Source.ENVIRONMENT, "BENTOML_PORT"),
    }
    told = settings_at(settings, Address("127.0.0.1", 82), origins)
    block = settings_block(told)
    assert "    hostname  127.0.0.1  bentoml serve --host\n" in block
    assert "    port      82         environment BENTOML_PORT\n" in block
    assert "note: port 81 (environment INFINITY_PORT) has no effect; environment BENTOML_PORT wins." in block


def test_our_own_options_keep_their_origin_where_bentoml_agrees() -> None:
    settings = resolve({"port": "82"})
    told = settings_at(settings, Address("0.0.0.0", 82), {"port": Origin(Source.FLAG, "--port")})
    assert str(told.origins["port"]) == "command line" and told.notes == ()


def test_workers_read_the_url_from_the_folder_of_the_run(tmp_path) -> None:
    assert read_url(None) == "" and read_url(tmp_path) == ""
    leave_url(tmp_path, Address("0.0.0.0", 3000))
    assert read_url(tmp_path) == "http://127.0.0.1:3000"
