"""Where a server listens: whether the port is free, what to type into a browser, and who else could.

The command line asks before it becomes the server; the supervisor asks again, since ``bentoml serve`` has flags of its
own. The address travels to the workers as a file in the folder of the run.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from infinity_bento.errors import ConfigError
from infinity_bento.settings import Origin, Settings, Source

_URL_FILE = "url"
_HOST_FILE = "host"
_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address that means all of them is none to connect to


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port to listen on."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        """What reaches the server from this machine."""
        host = _THIS_MACHINE.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether this machine alone can connect."""
        return ipaddress.ip_address(self.host).is_loopback


def require_free(address: Address, flag: str = "--port") -> None:
    """Refuse a port that cannot be had; ``flag`` is the option that chooses it.

    Raises:
        ConfigError: If it is taken, needs privileges, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: a recent one is no bar
            probe.bind((address.host, address.port))
    except OSError as error:
        raise ConfigError(_sentence(address, error, flag), param=flag.removeprefix("--")) from error


def _sentence(address: Address, error: OSError, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {address.port} of {address.host} is in use by another process; choose another one with {flag}, "
            f"such as {flag} {address.port + 1 if address.port < 65535 else 3000}, or stop that process."
        )
    if error.errno == errno.EACCES:
        return f"Port {address.port} needs privileges that this process lacks; choose one from 1024 with {flag}."
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"Address {address.host} is none of this machine's; listen on 0.0.0.0 for all of them, or on 127.0.0.1 for "
            "this machine only."
        )
    return f"Cannot listen on {address.host}, port {address.port} ({error.strerror or error}); choose another address."


def exposure(address: Address, *, has_key: bool, flag: str, grpc_port: int | None = None) -> str | None:
    """Who else may use a server without a key, and how to change that; None if nobody.

    Args:
        address: Where it listens.
        has_key: Whether requests must carry an API key.
        flag: How the address is chosen: ``--hostname``, or BentoML's ``--host``.
        grpc_port: Where it listens as well, if it does.
    """
    if has_key or address.is_private:
        return None
    where = "all interfaces" if address.host in _THIS_MACHINE else address.host
    ports = f"port {address.port}" + ("" if grpc_port is None else f" or {grpc_port}")
    return (
        f"open to everyone who can reach {ports} of this machine: it listens on {where}, and no API key is "
        f"set. To close it: {flag} 127.0.0.1 (this machine only), or INFINITY_API_KEY / --api-key."
    )


def settings_at(settings: Settings, address: Address, origins: dict[str, Origin]) -> Settings:
    """The settings with the address that BentoML was told, for the start-up block.

    Args:
        settings: As resolved.
        address: Where the server listens.
        origins: Where the ``hostname`` and the ``port`` come from, if BentoML has them from elsewhere.
    """
    changed = {
        name: origin
        for name, origin in origins.items()
        if getattr(settings, name) != {"hostname": address.host, "port": address.port}[name]
    }
    notes = tuple(
        f"{name} {getattr(settings, name)} ({settings.origins[name]}) has no effect; {origin} wins."
        for name, origin in changed.items()
        if settings.origins[name].source is not Source.DEFAULT
    )
    return replace(
        settings,
        hostname=address.host,
        port=address.port,
        origins={**settings.origins, **changed},
        notes=(*settings.notes, *notes),
    )


def leave_url(folder: Path, address: Address) -> None:
    """Tell the workers of a run where they are reached."""
    (folder / _URL_FILE).write_text(address.url)


def leave_host(folder: Path, address: Address) -> None:
    """Tell the workers of a run which address to listen on."""
    (folder / _HOST_FILE).write_text(address.host)


def read_host(folder: Path | None) -> str | None:
    """The address that this run listens on; None if nobody knows."""
    file = folder / _HOST_FILE if folder is not None else None
    return file.read_text() if file is not None and file.is_file() else None


def read_url(folder: Path | None) -> str:
    """Where this run is reached; empty if nobody knows."""
    file = folder / _URL_FILE if folder is not None else None
    return file.read_text() if file is not None and file.is_file() else ""
