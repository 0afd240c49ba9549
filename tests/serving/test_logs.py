"""Lines of the log: each event is one, and nothing a client sends makes another."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

import paellapy as pp
from paellapy.instrument.errors import PaellaError
from paellapy.serving.logs import Output, _Lines, log


def line(message="request", style="text", exc_info=None, **fields):
    record = logging.LogRecord("paellapy.serving", logging.INFO, "", 0, message, None, exc_info)
    record.fields = fields
    return _Lines(style, "").format(record)


def test_plain_values_stand_as_they_are():
    assert line(path="/v2/models/mlp/infer", status=200, ms=0.25).endswith(
        " info request path=/v2/models/mlp/infer status=200 ms=0.25"
    )


@pytest.mark.parametrize(
    "value",
    ["/a\n2026-01-01T00:00:00.000Z info request", "/\x1b[2J", "/\x9b2J", "/\u2028x", "/\u202etxt", "\r", "/\udcff"],
)
def test_control_characters_are_written_out(value):
    for said in (line(path=value), line(message=value)):
        assert said.isprintable()
        assert said.isascii()


@pytest.mark.parametrize("value", ["a b", "a status=200", 'say "so"', "back\\slash x", "", "tab\there", "two\nlines"])
def test_values_that_would_not_end_where_they_seem_to_are_in_quotes(value):
    said = line(client=value, status=404)
    quoted = said.partition("client=")[2].removesuffix(" status=404")
    assert json.loads(quoted) == value


def test_an_error_cannot_write_a_line_of_its_own():
    try:
        raise ValueError("bad\n2026-01-01T00:00:00.000Z info request \x1b[2J")
    except ValueError:
        said = line("a request failed", exc_info=sys.exc_info())
    first, *rest = said.split("\n")
    assert first.endswith("a request failed")
    assert "Traceback" in rest[0]
    assert all(each.startswith("  ") and each.isprintable() for each in rest)


@pytest.mark.parametrize("value", ["\ud800", "é\udcff", ["\udcff", "ü"], {"\udfff": ["\ud800"]}, ("a", "\udcff")])
def test_json_is_valid_whatever_an_error_says(value):
    assert json.loads(line(style="json", error=value, message=f"{value}"))["error"]


def test_a_server_with_json_logs_writes_no_other_lines(monkeypatch):
    def end():
        raise PaellaError(field="PAELLAPY_QUIET", given=os.environ["PAELLAPY_QUIET"])

    monkeypatch.setenv("PAELLAPY_QUIET", "")  # noted, so that it is put back
    monkeypatch.delenv("PAELLAPY_QUIET")
    monkeypatch.setattr("paellapy.serving.preflight.check_machine", end)
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    with pytest.raises(PaellaError) as caught:
        pp.serve([], server={"log_format": "json"})
    assert caught.value.given == "1"


def test_json_holds_values_as_they_are():
    assert json.loads(line(style="json", path="/a\nb"))["path"] == "/a\nb"


# -- a log that nobody reads


def test_a_log_that_nobody_reads_holds_nobody_up_and_says_what_it_dropped():
    read, write = os.pipe()
    with open(write, "w") as stream, open(read, "rb", buffering=0) as reader:
        output = Output(stream)
        text = "x" * 1000

        def log_one():
            output.emit(logging.LogRecord("paellapy.serving", logging.INFO, "", 0, text, None, None))

        for _ in range(200):  # three times what a pipe holds
            log_one()
        assert 0 < (dropped := output.dropped) < 200
        taken = reader.read(1 << 20)
        assert taken.count(b"\n") == 200 - dropped
        log_one()
        said, line = reader.read(1 << 20).splitlines()
        assert (said.split()[0], line) == (str(dropped).encode(), text.encode())
        assert output.dropped == 0
        reader.close()
        log_one()  # the reader is gone
        assert output.dropped == 1


def test_closed_streams_are_not_given_to_connections():
    code = """if True:
        import os, socket, sys
        os.close(1), os.close(2)
        sys.stdout = sys.stderr = None  # as Python starts without them
        from paellapy.serving.logs import open_streams
        open_streams()
        print("nobody reads this", file=sys.stderr)
        sys.exit(os.fstat(1).st_rdev != os.fstat(2).st_rdev or socket.socket().fileno() < 3)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_log_on_a_full_device_is_dropped():
    with open("/dev/full", "wb", buffering=0) as stream:
        output = Output(stream)
        output.emit(logging.LogRecord("paellapy.serving", logging.INFO, "", 0, "text", None, None))
        assert output.dropped == 1
