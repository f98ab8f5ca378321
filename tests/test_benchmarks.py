"""The benchmarks' own parts: texts, percentiles, vector check, client, loops, reports, against a tiny raw server."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import common, http, inprocess, overload, traffic
from benchmarks.client import Client, parse_target
from benchmarks.common import BenchmarkError, Comparison
from benchmarks.workloads import draw_lengths, make_workload

Responder = Callable[[str, bytes], Awaitable[list[bytes]]]  # path and body -> pieces to write; empty: close at once


@contextmanager
def serving(respond: Responder) -> Iterator[str]:
    """The URL of a keep-alive HTTP server on loopback that writes what ``respond`` says, piece by piece."""
    started, stop = threading.Event(), threading.Event()
    port = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().partition("content-length:")[2].split()[0])
                pieces = await respond(head.split()[1], await reader.readexactly(length))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002 if len(pieces) > 1 else 0)
                if not pieces or b"connection: close" in pieces[0]:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has gone, or the test is over
        finally:
            writer.close()

    async def main() -> None:
        nonlocal port
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
        port = server.sockets[0].getsockname()[1]
        started.set()
        await asyncio.to_thread(stop.wait)
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(10)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(10)


def reply(body: bytes, status: int = 200, extra: str = "") -> list[bytes]:
    return [f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body]


def vector(text: str) -> list[float]:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    row = np.random.default_rng(seed).normal(size=8)
    return [float(x) for x in row / np.linalg.norm(row)]


def embeddings(texts: list[str], shift: float = 0.0) -> bytes:
    data = [{"index": i, "embedding": [x + shift for x in vector(t)]} for i, t in enumerate(texts)]
    return json.dumps({"data": data[::-1], "usage": {"total_tokens": 5 * len(texts)}}).encode()


class Good:
    """Right vectors, and metrics that grow by 10 batches of 30 texts with every reading."""

    def __init__(self) -> None:
        self.reads = 0

    async def __call__(self, path: str, body: bytes) -> list[bytes]:
        if path == "/metrics":
            self.reads += 1
            text = f"te_batch_next_size_sum {30.0 * self.reads}\nte_batch_next_size_count {10 * self.reads}\n"
            return reply(text.encode())
        if path == "/info":
            return reply(b'{"version": "1.0", "model_id": "/secret/place", "models": []}')
        return reply(embeddings(json.loads(body)["input"]))


async def wrong_in_batches(path: str, body: bytes) -> list[bytes]:
    texts = json.loads(body or b"{}").get("input", [])
    return reply(embeddings(texts, shift=0.0 if len(texts) == 1 else 0.01))


def run_http(url: str, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    arguments = ["--url", url, "--texts", "6", "--requests", "12", "--warmup", "2", "--out", str(out), *more]
    code = http.main(arguments)
    files = sorted(out.glob("*.json"))
    return code, json.loads(files[-1].read_text()) if files else {}


# --- texts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "low", "high", "mean"),
    [("short", 6, 40, (16, 21)), ("mixed", 8, 512, (85, 125)), ("fixed-33", 33, 33, (33, 33))],
)
def test_lengths_keep_their_bounds(shape: str, low: int, high: int, mean: tuple[int, int]) -> None:
    lengths = draw_lengths(shape, 2000, 7)
    assert min(lengths) >= low and max(lengths) <= high
    assert mean[0] <= sum(lengths) / len(lengths) <= mean[1]
    assert lengths == draw_lengths(shape, 2000, 7)


@pytest.mark.parametrize("shape", ["long", "fixed", "fixed-", "fixed-2", "fixed-x"])
def test_unknown_lengths_are_refused_by_name(shape: str) -> None:
    with pytest.raises(BenchmarkError, match=f"'{shape}'.*short, mixed or fixed-N"):
        draw_lengths(shape, 1, 7)


def test_texts_have_exactly_the_drawn_lengths() -> None:
    made = make_workload("short", 100, 7, common.demo_model() / "tokenizer.json")
    assert list(made.tokens or ()) == draw_lengths("short", 100, 7)
    assert len(set(made.texts)) == 100


def test_tokens_above_the_model_limit_are_not_counted() -> None:
    made = make_workload("fixed-64", 3, 7, common.demo_model() / "tokenizer.json", max_length=32)
    assert made.tokens == (32, 32, 32)


def test_texts_without_a_tokenizer_are_words() -> None:
    made = make_workload("fixed-20", 4, 7)
    assert [len(text.split()) for text in made.texts] == [18] * 4
    assert made.tokens is None and "tokens" not in made.describe()


def test_the_digest_follows_the_seed() -> None:
    first, again, other = (make_workload("short", 5, seed).describe()["sha256"] for seed in (7, 7, 8))
    assert first == again != other


# --- vectors and figures ----------------------------------------------------------------------------------------------
def test_comparison_keeps_the_worst() -> None:
    reference = np.eye(3, dtype=np.float32)
    comparison = Comparison()
    comparison.add(reference, reference)
    assert (comparison.worst_cosine, comparison.max_abs_diff, comparison.rows) == (1.0, 0.0, 3)
    comparison.add(np.array([[1.0, 0.5, 0.0]], np.float32), reference[:1])
    comparison.add(reference, reference)
    assert comparison.worst_cosine == pytest.approx(1 / math.sqrt(1.25))
    assert comparison.max_abs_diff == pytest.approx(0.5)
    assert comparison.passes(0.8, 0.6) and not comparison.passes(0.9, 0.6) and not comparison.passes(0.8, 0.4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_rows_that_are_no_vectors_never_pass(bad: float) -> None:
    comparison = Comparison()
    comparison.add(np.full((1, 3), bad, np.float32), np.ones((1, 3), np.float32))
    assert not comparison.passes(-1.0, 1e9)
    json.dumps(comparison.summary(), allow_nan=False)


def test_nothing_compared_does_not_pass() -> None:
    assert not Comparison().passes(0.0, 1.0)
    with pytest.raises(ValueError, match="shape"):
        Comparison().add(np.ones((1, 2), np.float32), np.ones((1, 3), np.float32))


def test_percentiles_agree_with_numpy() -> None:
    values = [float(x) for x in np.random.default_rng(3).exponential(size=137)]
    for percent in (0, 1, 50, 95, 99, 100):
        assert common.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert common.percentile([4.0], 99) == 4.0
    with pytest.raises(ValueError, match="nothing"):
        common.percentile([], 50)


def test_percentiles_of_too_few_values_are_not_shown() -> None:
    summary = common.latency_summary([0.001] * 99)
    assert summary["p95_ms"] == pytest.approx(1.0) and summary["p99_ms"] is None
    assert common.latency_summary([]) == {"p50_ms": None, "p95_ms": None, "p99_ms": None, "max_ms": None}


def test_histograms_are_read_over_all_labels() -> None:
    before = 'x_sum{m="a"} 10\nx_count{m="a"} 2\nx_counter 5\n'
    after = 'x_sum{m="a"} 30\nx_sum{m="b"} 5.0\nx_count{m="a"} 5\nx_count{m="b"} 2\nx_bucket{le="1"} 9\n'
    assert http.histogram(after, "x") == (35.0, 7.0)
    assert http.mean_between(before, after, "x") == pytest.approx(25 / 5)
    assert http.mean_between(after, after, "x") is None
    assert http.histogram(None, "x") is None


# --- report -----------------------------------------------------------------------------------------------------------
def test_reports_are_dated_and_plain_json(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 12, 1, 3, 4, 5, tzinfo=datetime.UTC)
    file = common.write_report(tmp_path / "new", "http", {"a": 1}, now=lambda: moment)
    assert file.name == "2026-12-01T030405Z-http.json"
    assert json.loads(file.read_text()) == {"benchmark": "http", "date": "2026-12-01T03:04:05Z", "a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.write_report(tmp_path, "http", {"a": math.nan})


def test_commands_are_published_without_folders() -> None:
    shown = common.published_command("m", ["--url", "http://127.0.0.1:1", "--reference", "st:/a/b/c/d", "--out=/x/y/z"])
    assert shown == "python -m m --url http://127.0.0.1:1 --reference st:.../c/d --out=.../y/z"


def test_the_machine_is_described() -> None:
    about = common.machine()
    assert about["cores"] >= 1 and about["cpu"] and about["memory_gib"] > 0
    assert common.versions()["numpy"] == np.__version__


# --- client -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://192.0.2.1:3000", "--allow-remote"),
        ("https://example.com", "--allow-remote"),
        ("http://localhost.example.com", "--allow-remote"),
        ("127.0.0.1:3000", "not an HTTP URL"),
        ("ftp://127.0.0.1", "not an HTTP URL"),
        ("http://127.0.0.1:port", "not a URL"),
    ],
)
def test_urls_that_are_not_this_machine_are_refused(url: str, problem: str) -> None:
    with pytest.raises(BenchmarkError, match=problem):
        parse_target(url, allow_remote=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:3000/", "http://localhost", "http://[::1]:80/v2"])
def test_loopback_urls_are_accepted(url: str) -> None:
    payload = parse_target(url, allow_remote=False, authorization="key").payload("POST", "/embed", b"{}")
    assert b"/embed HTTP/1.1\r\nHost: " in payload and b"Authorization: Bearer key\r\n" in payload
    assert payload.endswith(
        b"Content-Length: 2\r\nContent-Type: application/json\r\nAuthorization: Bearer key\r\n\r\n{}"
    )


def ask(url: str, times: int = 1, timeout_seconds: float = 5.0) -> list[Any]:
    """Answers, or the errors raised instead, of requests one after the other."""

    async def main() -> list[Any]:
        client = Client(parse_target(url, allow_remote=False), timeout_seconds)
        found: list[Any] = []
        for _ in range(times):
            try:
                found.append(await client.send(client.target.payload("POST", "/x", b"{}")))
            except OSError as error:
                found.append(error)
        await client.close()
        return found

    return asyncio.run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
        [b"HTTP/1.1 200 O", b"K\r\nContent-Length: 5\r", b"\n\r\nhe", b"llo"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nhe\r\n3;x=y\r\nl", b"lo\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhel", b"lo"],
    ],
)
def test_every_framing_is_read(pieces: list[bytes]) -> None:
    async def respond(path: str, body: bytes) -> list[bytes]:
        return pieces

    with serving(respond) as url:
        answers = ask(url, times=3)
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"hello")] * 3


def test_broken_servers_become_errors_not_hangs() -> None:
    async def close(path: str, body: bytes) -> list[bytes]:
        return []

    async def garbage(path: str, body: bytes) -> list[bytes]:
        return [b"SSH-2.0-OpenSSH\r\n\r\n"]

    async def silent(path: str, body: bytes) -> list[bytes]:
        await asyncio.sleep(0.3)
        return []

    for respond, kind in ((close, ConnectionError), (garbage, ConnectionError), (silent, TimeoutError)):
        with serving(respond) as url:
            assert isinstance(ask(url, timeout_seconds=0.1)[0], kind)


# --- loops ------------------------------------------------------------------------------------------------------------
def test_arrivals_are_a_poisson_process_of_the_asked_rate() -> None:
    times = traffic.arrivals(50.0, 7)
    events = [next(times) for _ in range(5000)]
    gaps = np.diff(events)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.05)  # exponential: as wide as its mean
    again = traffic.arrivals(50.0, 7)
    assert events[:10] == [next(again) for _ in range(10)]


def test_the_closed_loop_keeps_as_many_in_flight_as_clients() -> None:
    now = most = done = 0

    async def send(shot: traffic.Shot) -> None:
        nonlocal now, most, done
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        done += 1

    shot = traffic.Shot(b"", 1, None, None)
    asyncio.run(traffic.closed_loop(traffic.until([shot], 20, None), 4, send))
    assert (most, done) == (4, 20)


def test_an_open_loop_latency_counts_from_the_scheduled_arrival() -> None:
    seen: list[float] = []
    lags: list[float] = []

    async def send(shot: traffic.Shot, scheduled: float) -> None:
        seen.append(scheduled)
        await asyncio.sleep(0.05)

    shot = traffic.Shot(b"", 1, None, None)
    times = iter([0.0, 0.001, 0.002])
    asyncio.run(traffic.open_loop(traffic.until([shot], 3, None), times, 1, send, lags))
    assert [round(s - seen[0], 4) for s in seen] == [0.0, 0.001, 0.002]
    assert lags[2] > 0.08  # one in flight at most: the third waited for two answers


# --- whole runs -------------------------------------------------------------------------------------------------------
def test_a_run_reports_rates_latencies_and_checked_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Good()) as url:
        code, report = run_http(url, tmp_path, "--batch-size", "4", "--clients", "2", "--slo-ms", "60000")
    results = report["results"]
    assert code == 0 and results["outcomes"] == {"200": 12}
    assert results["texts_per_s"] == pytest.approx(48 / results["seconds"])
    assert results["tokens_per_s"] == pytest.approx(240 / results["seconds"])
    assert results["within_slo"] == 1.0 and results["mean_batch_size"] == 3.0
    assert report["check"]["passed"] and report["check"]["rows"] == 48
    assert report["server"] == {"version": "1.0"}
    assert {"date", "commit", "machine", "versions", "command"} <= set(report)
    assert "within tolerance" in capsys.readouterr().out


def test_an_open_loop_run_reports_its_lag(tmp_path: Path) -> None:
    with serving(Good()) as url:
        code, report = run_http(url, tmp_path, "--rate", "400")
    assert code == 0 and report["results"]["outcomes"] == {"200": 12}
    assert report["results"]["arrival_lag_max_ms"] >= report["results"]["arrival_lag_p50_ms"] >= 0


def test_vectors_that_change_in_a_batch_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(wrong_in_batches) as url:
        code, report = run_http(url, tmp_path, "--batch-size", "2")
    assert code == 1 and not report["check"]["passed"]
    assert report["check"]["max_abs_diff"] == pytest.approx(0.01, rel=0.01)
    assert "OUT OF TOLERANCE" in capsys.readouterr().out


def test_a_reference_file_is_made_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "reference.npy")
    with serving(Good()) as url:
        assert run_http(url, tmp_path, "--save-reference", file)[0] == 0
        assert run_http(url, tmp_path, "--reference", file)[0] == 0
        np.save(file, -np.load(file))
        assert run_http(url, tmp_path, "--reference", file)[0] == 1
        assert run_http(url, tmp_path, "--reference", file, "--texts", "5")[0] == 2
    assert "there are 5 texts" in capsys.readouterr().err


def test_errors_are_counted_by_status_and_fail_the_run(tmp_path: Path) -> None:
    calls = itertools.count()

    async def flaky(path: str, body: bytes) -> list[bytes]:
        if path != "/limit":
            return await Good()(path, body)
        number = next(calls) % 3
        if number == 0:
            return reply(b'{"error": "too much"}', 429)
        return reply(b'{"data": []}') if number == 1 else reply(embeddings(json.loads(body)["input"]))

    with serving(flaky) as url:
        options = ("--path", "/limit", "--reference", "none", "--warmup", "0")
        code, report = run_http(url, tmp_path, *options)
        allowed, _ = run_http(url, tmp_path, *options, "--allow-errors")
    assert report["results"]["outcomes"] == {"200": 4, "429": 4, "malformed": 4}
    assert report["results"]["examples"]["429"] == '{"error": "too much"}'
    assert (code, allowed, report["check"]) == (1, 0, None)


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_http("http://127.0.0.1:9", tmp_path)
    assert (code, report) == (2, {})
    assert "start it first" in capsys.readouterr().err


@pytest.mark.parametrize(("retry_after", "code"), [("retry-after: 1\r\n", 0), ("", 1), ("retry-after: soon\r\n", 1)])
def test_overload_wants_refusals_with_retry_after(
    retry_after: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = 0

    async def limited(path: str, body: bytes) -> list[bytes]:
        nonlocal busy
        if busy >= 5:
            return reply(b"{}", 429, retry_after)
        busy += 1
        await asyncio.sleep(0.1 if len(path) > 1 else 0)
        busy -= 1
        return await Good()(path, body)

    with serving(limited) as url:
        arguments = ["--url", url, "--texts", "2", "--at-once", "20", "--limit", "5", "--out", str(tmp_path)]
        assert overload.main(arguments) == code
    report = json.loads(next(tmp_path.glob("*-overload.json")).read_text())
    assert report["results"]["outcomes"] == {"200": 5, "429": 15}
    assert report["results"]["recovered"] and report["check"]["rows"] == 5
    assert ("Retry-After of whole seconds" in capsys.readouterr().out) == bool(code)


def test_overload_notices_a_limit_that_is_never_enforced(tmp_path: Path) -> None:
    with serving(Good()) as url:
        arguments = ["--url", url, "--texts", "2", "--at-once", "8", "--limit", "5", "--out", str(tmp_path)]
        assert overload.main(arguments) == 1


@pytest.mark.parametrize("name", ["http", "inprocess", "overload"])
def test_benchmarks_also_run_as_scripts(name: str) -> None:
    script = common.ROOT / "benchmarks" / f"{name}.py"
    shown = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"python -m benchmarks.{name}" in shown.stdout


# --- in process -------------------------------------------------------------------------------------------------------
class FakeSide:
    """Answers with fixed seconds and rows."""

    def __init__(self, name: str, seconds: float, rows: list[list[float]]) -> None:
        self.name, self.seconds, self.rows, self.asked = name, seconds, np.array(rows, np.float32), 0

    def ask(self, workload: Any, at_once: bool) -> dict[str, Any]:
        self.asked += 1
        return {"s": self.seconds, "cpu_s": 1.0, "latencies": [self.seconds], "rss_mb": 5.0, "rows": self.rows}


def test_in_process_figures_are_medians_and_ratios_to_the_base() -> None:
    sides: Any = [FakeSide(inprocess.BASE, 2.0, [[1, 0]]), FakeSide(inprocess.OURS, 0.5, [[1, 0.1]])]
    workload: Any = SimpleNamespace(shape="short", texts=("a",), tokens=(3,))
    results = inprocess.measure(sides, workload, True, argparse.Namespace(rounds=3, seed=7))
    ours = results[inprocess.OURS]
    assert (ours["median_s"], ours["ratio"], ours["texts_per_s"], ours["tokens_per_s"]) == (0.5, 4.0, 2.0, 6.0)
    assert ours["vectors"]["max_abs_diff"] == pytest.approx(0.1) and ours["vectors"]["rows"] == 3
    assert results[inprocess.BASE]["ratio"] == 1.0 and "p50_ms" not in ours
    assert "| A | engine | 0.500 |" in inprocess.table({"results": {"A": results}})


def test_one_by_one_measurements_keep_their_latencies() -> None:
    answer = inprocess.timed(lambda texts: np.array([[len(t)] for t in texts], np.float32), ["a", "bb", "ccc"], False)
    assert len(answer["latencies"]) == 3 and answer["s"] == pytest.approx(sum(answer["latencies"]))
    assert answer["rows"].tolist() == [[1], [2], [3]]


@pytest.mark.parametrize("argv", [["--workloads", "AX"], ["--rounds", "0"], ["--option", "dtype"]])
def test_in_process_arguments_are_checked(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inprocess.arguments(argv)
    assert argv[1] in capsys.readouterr().err
