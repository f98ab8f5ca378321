"""What the supervisor says before it starts workers: the settings in force, where it listens, and who can reach that.

Called by ``serving.check_before_workers``. BentoML's flags ``--host`` and ``--port`` win over our options, and are read
here from the command that runs.
"""

from __future__ import annotations

import ipaddress
import logging
import os

import click
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml.exceptions import BentoMLException
from click.core import ParameterSource

from infinity_bento.listening import Address, exposure, settings_at
from infinity_bento.options import ADDRESS
from infinity_bento.settings import Origin, Settings, Source
from infinity_bento.sources import handed_on_options
from infinity_bento.telemetry.startup import settings_block

logger = logging.getLogger(__name__)

_FLAGS = (("hostname", "host", "BENTOML_HOST"), ("port", "port", "BENTOML_PORT"))


def told_address() -> Address | None:
    """Where ``bentoml serve`` will listen; None: another program starts the server, and does not say where.

    Raises:
        BentoMLException: If ``--host`` is no IP address.
    """
    context = _serve_command()
    if context is None:
        return None
    host = context.params["host"] or BentoMLContainer.http.host.get()
    port = context.params["port"] or BentoMLContainer.http.port.get()
    encrypted = context.params.get("ssl_certfile") or BentoMLContainer.ssl.enabled.get()
    try:
        return Address(str(ipaddress.ip_address(host)), int(port), "https" if encrypted else "http")
    except ValueError:
        raise BentoMLException(f"--host is {host!r}; it must be {ADDRESS.allowed}.") from None


def announce(settings: Settings, address: Address | None) -> None:
    """Log how the server starts: its settings, who can reach it, and what happens now."""
    if address is None:
        logger.info("%s", settings_block(settings))
        logger.info("loading: requests are answered when the log says ready")
        return
    logger.info("%s", settings_block(settings_at(settings, address, _told_origins())))
    flag = "--hostname" if handed_on_options(os.environ) else "--host"
    risk = exposure(address, has_key=settings.api_key is not None, flag=flag, grpc_port=settings.grpc_port)
    if risk is not None:
        logger.warning("%s", risk)
    if settings.grpc_port is not None:
        logger.info("gRPC: tei.v1 on port %d of the same address", settings.grpc_port)
    logger.info(
        "loading: requests are answered when the log says ready; %s/readyz tells the stage (Ctrl+C ends the server)",
        address.url,
    )


def _serve_command() -> click.Context | None:
    context = click.get_current_context(silent=True)
    return context if context is not None and {"host", "port"} <= context.params.keys() else None


def _told_origins() -> dict[str, Origin]:
    """The origins of the address by option name, as far as it comes from BentoML's own flags."""
    context = _serve_command()
    origins = {}
    for option, flag, variable in _FLAGS:
        if context is not None and context.params[flag] is not None:
            by_variable = context.get_parameter_source(flag) is ParameterSource.ENVIRONMENT
            origins[option] = Origin(Source.ENVIRONMENT, variable) if by_variable else Origin(Source.FLAG, f"--{flag}")
    return origins
