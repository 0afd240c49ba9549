"""The load generator against a real server: it counts what happens, and says what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engine_models import scale_model
from serving_server import echo_model, running
from typer.testing import CliRunner

from paellapy.bench_report import table
from paellapy.cli import app
from serving.bench import Load, gaps, run_bench
from serving.bench_client import BenchError, Endpoint


@pytest.fixture(scope="module")
def server():
    models = [scale_model("one", batch=(1, 4)), echo_model("two", ["FP16", "INT32", "BOOL"], batch=(1, 4))]
    with running(models, keys={"me": "key"}) as found:
        yield found


QUICK = {"duration_s": 0.4, "warmup_s": 0.1, "headers": {"X-API-Key": "key"}}


@pytest.mark.parametrize("how", [{"concurrency": 4}, {"rate": 100}, {"rate": 100, "arrivals": "lognormal"}])
@pytest.mark.parametrize("binary", [True, False])
def test_it_measures_every_model(server, how, binary):
    result = run_bench(server.url, Load(**how, **QUICK, binary=binary, items=2))
    assert set(result["models"]) == {"one", "two"}
    assert not result["all"]["errors"]
    assert result["all"]["answered"] > 0
    latency = result["all"]["latency_ms"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert "key" not in json.dumps(result["load"])
    assert table(result).row_count == 3


def test_refusals_are_not_errors(server):
    result = run_bench(server.url, Load(("one",), concurrency=2, timeout_us=1, **QUICK))
    assert result["all"]["answered"] == 0
    assert result["all"]["refused"] > 0
    assert not result["all"]["errors"]
    assert table(result).row_count == 1


@pytest.mark.parametrize("arrivals", ["poisson", "lognormal", "even"])
def test_arrivals_have_the_rate_asked_for(arrivals):
    found = gaps(Load(rate=50.0, arrivals=arrivals, sigma=1.0), np.random.default_rng(0), 100_000)
    assert found.mean() == pytest.approx(1 / 50, rel=0.05)
    variation = {"poisson": 1.0, "lognormal": 1.31, "even": 0.0}[arrivals]
    assert found.std() / found.mean() == pytest.approx(variation, abs=0.1)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(), "one of the two"),
        (Load(rate=1, concurrency=1), "one of the two"),
        (Load(rate=-1), "above zero"),
        (Load(("nope",), concurrency=1, headers=QUICK["headers"]), "404"),
        (Load(concurrency=1), "401"),
    ],
)
def test_what_cannot_be_run_is_said(server, load, said):
    with pytest.raises(BenchError, match=said):
        run_bench(server.url, load)


def test_an_endpoint_that_is_not_there():
    with pytest.raises(BenchError, match="cannot be reached"):
        run_bench("http://127.0.0.1:1", Load(concurrency=1))
    with pytest.raises(BenchError, match="no address"):
        Endpoint.of("ftp://x")


def test_the_command_line(server, tmp_path):
    out = tmp_path / "out.json"
    arguments = ["bench", server.url, "--concurrency", "2", "--duration", "0.3", "--warmup", "0", "--model", "one"]
    found = CliRunner().invoke(app, [*arguments, "-H", "Authorization: Bearer key", "--json", str(out)])
    assert found.exit_code == 0, found.output
    assert "closed-loop, 2 clients" in found.output
    assert json.loads(out.read_text())["all"]["answered"] > 0
    for wrong in (["--arrivals", "odd"], ["-H", "nonsense"]):
        assert isinstance(CliRunner().invoke(app, [*arguments, *wrong]).exception, BenchError)
