"""The load generator against a real server: it counts what happens, and says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from engine_models import scale_model
from rich.console import Console
from served_models import words
from serving_server import echo_model, running
from typer.testing import CliRunner

from paellapy.cli import app
from paellapy.cli import bench as command
from paellapy.cli.bench import table
from paellapy.cli.scripts import OutputError
from paellapy.instrument.errors import PaellaError
from paellapy.serving.bench import targets
from paellapy.serving.bench.arrivals import Arrival, Load, gaps, read_trace
from paellapy.serving.bench.client import BenchError, Endpoint, Pool
from paellapy.serving.bench.load import PAUSE_S, Bench, Outcome, hdr, run_bench, shares, summarize
from paellapy.serving.bench.targets import MOST_NUMBERS
from paellapy.serving.protocol import DEFAULT_LEVEL

CERTIFICATE = Path(__file__).parents[2] / "tls" / "certificate.pem"


@pytest.fixture(scope="module")
def server():
    types = ["FP16", "INT32", "BOOL"]
    models = [scale_model("one", batch=(1, 4), target_ms=1e6), echo_model("two", types, batch=(1, 4))]
    with running(models, keys={"me": "key"}) as found:
        run_bench(found.url, Load(concurrency=2, **QUICK))  # what the first requests compile, no other waits for
        yield found


QUICK = {"duration_s": 0.8, "warmup_s": 0.1, "headers": {"X-API-Key": "key"}}


@pytest.mark.quick
@pytest.mark.parametrize("how", [{"concurrency": 4}, {"rate": 100}, {"rate": 100, "arrivals": "lognormal"}])
@pytest.mark.parametrize("binary", [True, False])
def test_it_measures_every_model(server, how, binary):
    result = run_bench(server.url, Load(**how, **QUICK, binary=binary, items=2, target_ms=1e6))
    assert result["all"]["within_target"] == 1.0
    assert {each["target_ms"] for each in result["models"].values()} == {1e6}
    assert set(result["models"]) == {"one", "two"}
    assert not result["all"]["errors"]
    assert result["all"]["answered"] > 0
    latency = result["all"]["latency_ms"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert "key" not in json.dumps(result["load"])
    assert table(result).row_count == 3


def test_refusals_are_not_errors(server):
    result = run_bench(
        server.url, Load(("one",), concurrency=2, timeout_us=1, duration_s=1.5, warmup_s=0.0, headers=QUICK["headers"])
    )
    assert result["all"]["answered"] == 0
    assert result["all"]["refused"] > 0
    assert not result["all"]["errors"]
    (said,) = result["all"]["refused_because"]
    assert "deadline" in said
    assert result["all"]["refused_because"][said] == result["all"]["refused"]
    assert result["all"]["refused"] <= 4  # told to come again in a second, its clients do
    assert table(result).row_count == 1


def test_the_load_that_nobody_asked_for_is_one_the_server_takes(monkeypatch, capsys):
    def run(target, load, progress, clients):
        refused = 50 if load.concurrency > 2 else 0
        return {"all": {"answered": 100, "refused": refused}}

    monkeypatch.setattr("paellapy.serving.bench.load.run_bench", run)
    found = command.bearable("http://127.0.0.1:1", Load(concurrency=8), Console(), 1)
    assert found.concurrency == 2
    assert "trying 4" in capsys.readouterr().out


def test_certificates_to_trust_are_read_and_asked_for_where_they_make_sense(tmp_path):
    ca = str(tmp_path / "ca.pem")
    for url, given in (("http://127.0.0.1:1", "http://127.0.0.1:1"), ("https://127.0.0.1:1", ca)):
        with pytest.raises(BenchError) as caught:
            Endpoint.of(url, ca)
        assert (caught.value.field, caught.value.given) == ("ca", given)
    assert Endpoint.of("https://localhost:1", str(CERTIFICATE)).tls is not None


@pytest.mark.parametrize("arrivals", ["poisson", "lognormal", "even"])
def test_arrivals_have_the_rate_asked_for(arrivals):
    found = gaps(Load(rate=50.0, arrivals=arrivals, sigma=1.0), np.random.default_rng(0), 100_000)
    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    variation = {"poisson": 1.0, "lognormal": 1.31, "even": 0.0}[arrivals]
    assert found.std() / found.mean() == pytest.approx(variation, abs=0.1)


@pytest.mark.parametrize(
    ("load", "field", "given"),
    [
        (Load(), "load", None),
        (Load(rate=1, concurrency=1), "load", None),
        (Load(rate=1, trace=(Arrival(0.0, "one"),)), "load", None),
        (Load(rate=-1), "rate", -1),
        (Load(rate=math.inf), "rate", math.inf),
        (Load(concurrency=1, items=0), "items", 0),
        (Load(concurrency=1, warmup_s=-1.0), "warmup", -1.0),
        (Load(concurrency=1, seed=-1), "seed", -1),
        (Load(rate=1, arrivals="lognormal", sigma=-1.0), "sigma", -1.0),
        (Load(("nope",), concurrency=1, headers=QUICK["headers"]), "status", 404),
        (Load(concurrency=1), "status", 401),
    ],
)
def test_loads_that_cannot_be_run(server, load, field, given):
    with pytest.raises(BenchError) as raised:
        run_bench(server.url, load)
    assert (raised.value.field, raised.value.given) == (field, given)


TRACE = [(k * 0.002, ("one", "two")[k % 2]) for k in range(60)]


@pytest.mark.parametrize(("kind", "clients"), [("csv", 1), ("jsonl", 2)])
def test_a_trace_is_followed_request_by_request(server, tmp_path, kind, clients):
    file = tmp_path / f"trace.{kind}"
    if kind == "csv":
        file.write_text("t,model\n" + "".join(f"{t + 100},{model}\n" for t, model in TRACE))
    else:
        file.write_text("".join(json.dumps({"t": t + 100, "model": model}) + "\n" for t, model in TRACE))
    load = Load(trace=read_trace(file), speed=2.0, headers=QUICK["headers"])
    result = run_bench(server.url, load, clients=clients)
    assert {name: each["answered"] for name, each in result["models"].items()} == {"one": 30, "two": 30}
    assert result["seconds"] == pytest.approx(TRACE[-1][0] / 2)
    assert result["clients"] == clients
    assert "60 requests of a trace" in table(result).title


def test_a_traces_deadlines_and_priorities_are_sent(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("t,model,deadline,priority\n3,m,2.5,1\n4,m,,\n")
    assert read_trace(file) == (Arrival(0.0, "m", 2500, DEFAULT_LEVEL - 1), Arrival(1.0, "m"))


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("a.csv", "x,model\n1,m\n", {"field": "t"}),
        ("a.csv", "t,model\n", {"field": "trace"}),
        ("a.jsonl", '{"t": 1}\n', {"field": "trace", "line": 1}),
        ("a.jsonl", "[]\n", {"field": "trace", "line": 1}),
        ("a.jsonl", "\xff", {"field": "trace"}),
        ("a.jsonl", None, {"field": "trace"}),
    ],
)
def test_traces_that_are_wrong_are_told(tmp_path, name, text, facts):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(PaellaError) as caught:
        read_trace(tmp_path / name)
    assert vars(caught.value).items() >= facts.items()


def test_several_client_processes_share_a_load(server):
    seen = []
    result = run_bench(server.url, Load(("one",), rate=60, **QUICK), lambda *values: seen.append(values), clients=2)
    assert result["all"]["answered"] > 0
    assert not result["all"]["errors"]
    assert seen
    assert [each.rate for each in shares(Load(rate=60), 2)] == [30, 30]
    assert [each.concurrency for each in shares(Load(concurrency=3), 2)] == [2, 1]


def test_a_client_process_that_fails_says_why(server):
    for concurrency, facts in ((2, {"field": "status", "given": 401}), (1, {"field": "clients", "limit": 1})):
        with pytest.raises(BenchError) as caught:
            run_bench(server.url, Load(("one",), concurrency=concurrency), clients=2)
        assert vars(caught.value).items() >= facts.items()


def test_the_same_load_on_an_engine_without_http(server):
    load = Load(concurrency=4, duration_s=0.3, warmup_s=0.1)
    result = run_bench(server.engine, load)
    assert set(result["models"]) == {"one", "two"}
    assert result["all"]["answered"] > 0
    assert not result["all"]["errors"]
    late = run_bench(server.engine, Load(("one",), rate=50, timeout_us=1, duration_s=0.2, warmup_s=0))
    assert late["all"]["answered"] == 0
    with pytest.raises(BenchError) as caught:
        run_bench(server.engine, Load(("nope",), concurrency=1))
    assert (caught.value.field, caught.value.given) == ("models", ["nope"])


def test_percentiles_get_denser_towards_the_end():
    times = np.random.default_rng(0).exponential(0.001, 10_000)
    found = hdr(times.tolist())
    percentiles = [p for p, _ in found]
    assert percentiles[0] == 0.0
    assert percentiles[-1] == 100.0
    assert percentiles == sorted(percentiles)
    assert sum(p > 99 for p in percentiles) > 20
    assert found[-1][1] == pytest.approx(times.max() * 1e3)
    for p, value in found:
        assert value == pytest.approx(np.percentile(times, p) * 1e3, abs=1e-3)


def test_the_command_line(server, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["bench", server.url, "--concurrency", "2", "--duration", "0.3", "--warmup", "0", "--model", "one"]
    found = CliRunner().invoke(app, [*arguments, "-H", "Authorization: Bearer key", "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "closed-loop, 2 clients" in found.output
    assert json.loads(out.read_text())["all"]["answered"] > 0
    for wrong in (["--arrivals", "odd"], ["-H", "nonsense"], ["--policy", "slack"], ["--config", "paella.toml"]):
        assert isinstance(CliRunner().invoke(app, [*arguments, *wrong]).exception, BenchError)


def test_where_the_result_goes_is_looked_at_before_anything_is_asked(tmp_path):
    arguments = ["bench", "http://127.0.0.1:1", "--concurrency", "1", "--json", str(tmp_path / "nowhere" / "x.json")]
    found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, OutputError)
    assert "nowhere" in str(found.exception)


def test_an_error_is_all_that_is_printed_of_a_run_that_cannot_be():
    found = CliRunner().invoke(app, ["bench", "http://127.0.0.1:1", "--concurrency", "1"])
    assert isinstance(found.exception, BenchError)
    assert not found.output


def test_a_table_of_80_columns_has_every_number_in_full():
    latency = {"p50": 1236.4, "p90": 2236.5, "p99": 12236.4, "p99.9": 112236.4, "max": 0.012345}
    row = {
        "answered_per_s": 12366.4, "latency_ms": latency, "refused": 123456, "errors": {"why": 7}, "within_target": 0.5,
        "target_ms": 50.0,
    }  # fmt: skip
    load = {"trace": None, "rate": 100.0, "arrivals": "poisson", "target_ms": 50.0}
    models = {"transformer": row, "a_model_whose_name_is_[very]_long": row}
    result = {"url": "http://127.0.0.1:8000", "load": load, "clients": 1, "seconds": 10.0, "all": row, "models": models}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(result))
    lines = console.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in "".join(lines)
    numbers = ["12366.4", "1236", "2236", "12236", "112236", "0.0123", "123456", "7", "50", "50.0%"]
    assert [line.split()[1:] for line in lines].count(numbers) == 3
    names = "".join(line.split()[0] for line in lines if line.strip())
    assert "transformera_model_whose_name_is_[very]_longall" in names


def test_without_names_models_that_take_texts_are_left_out_and_each_has_its_own_target():
    with running([scale_model("one", target_ms=1e6), *words()]) as found:
        result = run_bench(found.url, Load(concurrency=2, duration_s=0.2, warmup_s=0.0))
        with pytest.raises(BenchError):
            run_bench(found.url, Load(concurrency=2, models=("words",)))
    (own,) = result["models"].values()
    assert (own["target_ms"], own["within_target"]) == (1e6, 1.0)
    assert result["all"]["within_target"] == 1.0


class Stub:
    """A target whose requests all end in `outcome`, an awaitable function."""

    url, targets_ms = "nowhere", {}

    def __init__(self, outcome):
        self.asked, self._outcome = 0, outcome

    async def prepare(self, rng):
        return ["one"]

    async def ask(self, *given):
        self.asked += 1
        await self._outcome()

    def close(self):
        pass


def test_clients_that_wait_for_answers_pause_where_nobody_is_there():
    async def refuse():
        raise ConnectionRefusedError("nobody is there")

    target, load = Stub(refuse), Load(concurrency=2, duration_s=0.25, warmup_s=0.0)
    bench = Bench(target, load)
    asyncio.run(bench.run())
    assert 2 <= target.asked <= 2 * (2 + math.ceil(load.duration_s / PAUSE_S))
    assert set(bench.outcomes["one"].errors) == {"connection: nobody is there"}


@pytest.mark.parametrize("how", [{"concurrency": 3}, {"rate": 200.0}])
def test_requests_that_are_never_answered_are_errors(monkeypatch, how):
    monkeypatch.setattr("paellapy.serving.bench.load.PATIENCE_S", 0.05)
    bench = Bench(Stub(lambda: asyncio.Event().wait()), Load(duration_s=0.1, warmup_s=0.0, **how))
    asyncio.run(bench.run())
    ((said, n),) = bench.outcomes["one"].errors.items()
    assert "no answer" in said
    assert n >= 3


@pytest.fixture
def ended(monkeypatch):
    """Replaces the command line's run by one with a given result; yields the loads it was given."""
    loads = []

    def set_up(outcome, late_s=0.0):
        def run(target, load, console, clients):
            loads.append(load)
            return summarize(target, load, [({"one": outcome}, 1.0, late_s)])

        monkeypatch.setattr(command, "run", run)
        monkeypatch.setattr(command, "bearable", lambda target, load, console, clients: load)
        return loads

    return set_up


URL = "http://127.0.0.1:8000"


def test_an_address_is_enough(ended):
    loads = ended(Outcome([0.001]))
    found = CliRunner().invoke(app, ["bench", URL])
    assert found.exit_code == 0, found.output
    assert (loads[0].concurrency, loads[0].duration_s, loads[0].warmup_s) == (8, 10.0, 1.0)
    assert "late" not in found.output


@pytest.mark.parametrize("option", ["--duration", "--warmup"])
def test_a_trace_takes_as_long_as_it_takes(tmp_path, option):
    (tmp_path / "trace.csv").write_text("t,model\n0,one\n")
    found = CliRunner().invoke(app, ["bench", URL, "--trace", str(tmp_path / "trace.csv"), option, "2"])
    assert isinstance(found.exception, BenchError)
    assert option in str(found.exception)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(errors=Counter({"500: broken": 3})), 1),
        (Outcome([0.001], errors=Counter({"500: broken": 3})), 0),
        (Outcome(refused_s=[0.001], errors=Counter({"500: broken": 3})), 0),
    ],
)
def test_the_exit_code_says_whether_anything_was_measured(ended, outcome, code):
    ended(outcome)
    found = CliRunner().invoke(app, ["bench", URL])
    assert found.exit_code == code
    assert "3 × 500: broken" in found.output


def test_a_client_that_was_late_itself_says_so(ended):
    ended(Outcome([0.3]), late_s=0.25)
    assert "up to 250 ms late" in CliRunner().invoke(app, ["bench", URL, "--rate", "10"]).output


def test_the_command_line_on_an_engine(tmp_path):
    config = tmp_path / "paella.toml"
    config.write_text('[[models]]\nfactory = "paellapy.demo:load"\narguments = { name = "mlp", batch = [1] }\n')
    arguments = ["bench", "--engine", "virtual:h200", "--config", str(config), "--policy", "fifo"]
    found = CliRunner().invoke(app, [*arguments, "--concurrency", "2", "--duration", "0.2", "--warmup", "0"])
    assert found.exit_code == 0, found.output
    assert "engine on virtual:h200, fifo" in found.output
    assert isinstance(CliRunner().invoke(app, ["bench", "--concurrency", "2"]).exception, BenchError)


def answered_by(*pieces, ask=1, most=1 << 20):
    """A client's result for a server that answers each request with these pieces, one after another."""

    def serve(listening):
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    while connection.recv(1 << 16):
                        for piece in pieces:
                            connection.sendall(piece)
                            time.sleep(0.002)

    async def main(port):
        pool = Pool(Endpoint("127.0.0.1", port, "", None), 1)
        try:
            return [(await pool.ask(b"GET / HTTP/1.1\r\n\r\n", most))[:2] for _ in range(ask)]
        finally:
            pool.close()
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            return asyncio.run(main(listening.getsockname()[1]))
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


HEAD = b"HTTP/1.1 503 Busy\r\nContent-Length: 6\r\n\r\n"


@pytest.mark.parametrize("cut", [1, 12, len(HEAD) - 2, len(HEAD), len(HEAD) + 2, len(HEAD) + 6])
def test_answers_are_read_wherever_they_are_cut(cut):
    whole = HEAD + b"abcdef"
    assert answered_by(whole[:cut], whole[cut:], ask=2) == [(503, b"abcdef")] * 2


CLOSING = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("pieces", "most", "answer"),
    [
        ([HEAD + b"ab", b"cd", b"ef"], 3, (503, b"abc")),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], 100, (200, b"")),
        ([CLOSING + b"abcdef"], 100, (503, b"abcdef")),
    ],
    ids=["as much as is wanted", "no body", "another connection each time"],
)
def test_answers_are_read_one_after_another(pieces, most, answer):
    assert answered_by(*pieces, ask=3, most=most) == [answer] * 3


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        HEAD + b"abcdefg",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-9.9 200\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    ],
    ids=["no length", "longer than its length", "endless headers", "no status", "not HTTP", "length is no number"],
)
def test_answers_that_cannot_be_measured(answer):
    with pytest.raises(BenchError):
        answered_by(answer)


@contextlib.contextmanager
def answering(body):
    """The URL of a server that gives everybody this answer, or none."""
    ended = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if body is None:
                ended.wait()
                self.close_connection = True
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *given):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


METADATA = b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b}]}'


@pytest.mark.parametrize(
    ("body", "models", "field", "limit"),
    [
        (b"null", (), "answer", "v2"),
        (b'{"models": 5}', (), "answer", "v2"),
        (b"[1, 2]", (), "answer", "v2"),
        (b'[{"name": 5}]', (), "answer", "v2"),
        (b"\xff", (), "answer", "JSON"),
        (None, (), "answer", 0.1),
        (b"{}", ("m",), "answer", "v2"),
        (METADATA % b'["a"]', ("m",), "answer", "v2"),
        (METADATA % b"[100000, 100000]", ("m",), "shape", MOST_NUMBERS),
    ],
)
def test_a_server_that_speaks_another_protocol_or_is_silent_is_told(monkeypatch, body, models, field, limit):
    monkeypatch.setattr(targets, "ANSWER_S", 0.1 if body is None else targets.ANSWER_S)
    with answering(body) as url, pytest.raises(BenchError) as caught:
        run_bench(url, Load(models=models, concurrency=1, duration_s=0.1, warmup_s=0.0))
    assert (caught.value.field, caught.value.limit) == (field, limit)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "ftp://x", "http://127.0.0.1:99999", "http://[::1", "http://x:port"]
)
def test_an_address_where_nobody_is_or_can_be_is_told(url):
    with pytest.raises(BenchError) as caught:
        run_bench(url, Load(concurrency=1))
    assert (caught.value.field, caught.value.given) == ("url", url)
