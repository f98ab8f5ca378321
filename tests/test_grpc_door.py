"""The gRPC port before it is open: options, refusals in one sentence, what is imported when it is not wanted."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity_bento.errors import ConfigError
from infinity_bento.grpc_door import PACKAGES, require_grpc
from infinity_bento.images import GRPC_PACKAGES
from infinity_bento.listening import Address, exposure, leave_host, read_host
from infinity_bento.settings import resolve
from tests.bentos import free_port

ROOT = Path(__file__).parent.parent


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def at(port: int, scheme: str = "http") -> Address:
    return Address("127.0.0.1", port, scheme)


def test_it_is_off_by_default_and_chosen_from_every_source(tmp_path: Path) -> None:
    assert resolve({}).grpc_port is None and resolve({}).grpc_max_parallel_stream_requests == 1024
    assert resolve({"grpc-port": "50051"}).grpc_port == 50051
    assert resolve({}, {"INFINITY_GRPC_PORT": "50052"}).grpc_port == 50052
    preset = tmp_path / "preset.yaml"
    preset.write_text("grpc-port: 50053\ngrpc_max_parallel_stream_requests: 8\n")
    settings = resolve({}, {}, str(preset))
    assert (settings.grpc_port, settings.grpc_max_parallel_stream_requests) == (50053, 8)
    assert resolve({}, {"GRPC_MAX_PARALLEL_STREAM_REQUESTS": "16"}).grpc_max_parallel_stream_requests == 16


@pytest.mark.parametrize("given", ["0", "70000", "any"])
def test_a_port_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--grpc-port is .* must be an integer from 1 to 65535"):
        resolve({"grpc-port": given})


def test_a_kubernetes_service_of_that_name_is_told_apart() -> None:
    with pytest.raises(ConfigError, match="Service named 'infinity-grpc'"):
        resolve({}, {"INFINITY_GRPC_PORT": "tcp://10.0.0.1:50051"})


def test_without_the_option_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_grpc(resolve({}), at(3000))


def test_a_free_port_is_accepted() -> None:
    require_grpc(resolve({"grpc-port": str(free_port())}), at(3000))


def test_missing_packages_are_named_with_the_extra_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    settings = resolve({"grpc-port": "50051"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grpc_health" else real(name))
    with pytest.raises(ConfigError, match=r"grpcio-health-checking is not installed.*'infinity-bento\[grpc\]'"):
        require_grpc(settings, at(3000))

    def nothing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(ConfigError, match="grpcio, protobuf, grpcio-health-checking, grpcio-reflection are not"):
        require_grpc(settings, at(3000))


def test_the_port_of_http_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"where the HTTP routes are; .* --grpc-port 3001"):
        require_grpc(resolve({"grpc-port": "3000"}), at(3000))


def test_a_taken_port_is_refused_with_its_own_flag(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"Port {taken} of 127.0.0.1 is in use .* with --grpc-port") as caught:
        require_grpc(resolve({"grpc-port": str(taken)}), at(3000))
    assert caught.value.param == "grpc-port"


def test_beside_encrypted_routes_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has no TLS"):
        require_grpc(resolve({"grpc-port": "50051"}), at(3000, "https"))


def test_the_command_line_refuses_before_anything_is_started(taken: int) -> None:
    command = [sys.executable, "-m", "infinity_bento.cli", "serve", "--hostname", "127.0.0.1"]
    command += ["--port", str(free_port()), "--grpc-port", str(taken)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"infinity-bento: Port {taken}"), done.stderr


def test_who_can_reach_it_is_warned_of_both_ports() -> None:
    text = exposure(Address("0.0.0.0", 3000), has_key=False, flag="--host", grpc_port=50051)
    assert text is not None and "port 3000 or 50051" in text


def test_workers_learn_the_address_from_the_folder_of_the_run(tmp_path: Path) -> None:
    assert read_host(None) is None and read_host(tmp_path) is None
    leave_host(tmp_path, Address("0.0.0.0", 3000))
    assert read_host(tmp_path) == "0.0.0.0"


def test_a_server_without_it_imports_nothing_of_it() -> None:
    code = "import sys, service; found = {'grpc', 'google.protobuf'} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_image_gets_the_versions_that_are_tested() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(GRPC_PACKAGES) <= set(pins)
    assert {package.split("==")[0] for package in GRPC_PACKAGES} == set(PACKAGES.values())


def test_the_packages_that_are_looked_for_are_those_of_the_extra() -> None:
    (extra,) = re.findall(r"^grpc = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r'"([\w-]+)[>=]', extra)) == set(PACKAGES.values())
