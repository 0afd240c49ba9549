"""The front door: one protocol in front of several engines that come, refuse, end or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import types

import pytest
from engine_models import scale_model
from hypothesis import given
from hypothesis import strategies as st
from raw_client import Client
from router_server import INFER, X, asking, body, check, routing
from serving_server import ask, running

from paellapy.cluster.engine_state import EngineView, Learned, Member
from paellapy.cluster.headers import timeout_s, with_timeout
from paellapy.cluster.router import Forward, Router
from paellapy.instrument.errors import ArgumentError
from paellapy.serving.load_report import ModelOutlook, Outlook

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def engines():
    one, other = scale_model(batch=(1, 4)), scale_model(batch=(1, 4))
    with running([one, scale_model("only", factor=3.0, batch=(1,))]) as a, running([other]) as b:
        yield {"a": a, "b": b}


@pytest.fixture(scope="module")
def router(engines):
    with routing({name: each.url for name, each in engines.items()}) as found:
        found.wait_until(lambda: all(view.up for view in found.router.views.values()))
        yield found


def test_answers_are_the_engines_own(router):
    names = set()
    for k in range(20):
        x = X + k
        status, headers, said = ask(router, "POST", INFER, body(x))
        check((status, headers, said), x)
        names.add(headers["X-Engine"])
    assert names == {"a", "b"}
    check(ask(router, "POST", "/v2/models/only/infer", body()), factor=3.0)


def test_requests_on_one_connection_and_long_bodies_pass(router):
    with Client(router) as client:
        data = body()
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        client.send(head + data + head + data[:100])
        client.send(data[100:])
        for _ in range(2):
            status, _, content = client.answer()
            check((status, None, json.loads(content)))


def test_what_is_not_of_the_short_way_passes_too(router):
    data = gzip.compress(body())
    check(ask(router, "POST", INFER, data, {"Content-Encoding": "gzip"}))
    status, headers, _ = ask(router, "POST", INFER, body(), {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"})
    assert status == 200
    assert headers["traceparent"].startswith(f"00-{'1' * 32}")
    assert ask(router, "GET", "/v2/models/scale")[2]["name"] == "scale"
    assert ask(router, "GET", "/v2/models/scale/config")[2]["name"] == "scale"


def test_heads_are_answered_and_other_versions_are_not_ready(router):
    for path in ("/v2/models/scale", "/v2/models/scale/config", "/v2/models/scale/ready"):
        assert ask(router, "HEAD", path)[0] == 200
    assert ask(router, "GET", "/v2/models/scale/versions/1/ready")[0] == 200
    assert ask(router, "GET", "/v2/models/scale/versions/9/ready")[0] == 404


def test_errors_are_the_engines_own_or_the_routers(router):
    status, _, said = ask(router, "POST", INFER, b"{}")
    assert status == 400
    status, _, said = ask(router, "POST", "/v2/models/none/infer", body())
    assert status == 404
    assert "there are only, scale" in said["error"]
    assert ask(router, "GET", "/v2/models/none")[0] == 404
    assert ask(router, "GET", "/nowhere")[0] == 404
    assert ask(router, "POST", "/v2/repository/models/scale/unload", b"{}")[0] == 403


def test_the_cluster_has_one_index_and_one_of_everything_else(router):
    check(ask(router, "POST", INFER, body()))
    assert ask(router, "GET", "/v2/health/ready")[2] == {"ready": True}
    index = {each["name"]: each for each in ask(router, "POST", "/v2/repository/index", b"")[2]}
    assert index["scale"]["state"] == index["only"]["state"] == "READY"
    assert index["scale"]["reason"] == "on a, b"
    stats = ask(router, "GET", "/v2/models/scale/stats")[2]["model_stats"]
    answered = ask(router, "GET", "/v2/models/stats")[2]["model_stats"]
    assert [each["name"] for each in stats] == ["scale"]
    assert {each["name"] for each in answered} == {"scale", "only"}
    sent = sum(view.sent for view in router.router.views.values())
    assert 0 < stats[0]["inference_stats"]["success"]["count"] <= sent
    page = ask(router, "GET", "/metrics")[2].decode()
    assert '\npaellapy_engine_up{engine="a"} 1' in page
    assert '\npaellapy_ready{engine="b"} 1.0' in page
    assert "\npaellapy_router_requests_total " in page
    assert page.count("# TYPE paellapy_items_total counter") == 1
    status = ask(router, "GET", "/v2/cluster")[2]
    assert [each["up"] for each in status["engines"]] == [True, True]


def test_metrics_are_what_prometheus_reads(engines, router):
    from prometheus_client.parser import text_string_to_metric_families

    for each in engines.values():
        assert ask(each, "POST", INFER, body())[0] == 200
    page = ask(router, "GET", "/metrics")[2].decode()
    families = {each.name: each for each in text_string_to_metric_families(page)}
    assert {sample.labels["engine"] for sample in families["paellapy_request_seconds"].samples} == {"a", "b"}


def test_a_refusal_goes_to_the_next_engine(engines, router):
    """Engine a has no room for one more; b has."""
    slow = Learned()
    slow.actual_ms = 1e6  # so that a is asked first
    router.do(router.router.views["b"].learned.__setitem__, "scale", slow)
    refused = router.router.counts.refused
    limit = _refuse_all(engines["a"])
    try:
        status, headers, _ = ask(router, "POST", INFER, body(parameters={"timeout": 5_000_000}))
        assert (status, headers["X-Engine"]) == (200, "b")
        assert router.router.counts.refused == refused + 1
        other = _refuse_all(engines["b"])
        status, headers, said = ask(router, "POST", INFER, body(parameters={"timeout": 5_000_000}))
        assert status == 503
        assert "in flight" in said["error"]
        assert int(headers["Retry-After"]) >= 1
        other()
    finally:
        limit()
        router.do(router.router.views["b"].learned.clear)


def _refuse_all(engine):
    """Makes admission refuse everything: as many requests are in flight as are allowed."""
    ask(engine, "POST", INFER, body(parameters={"timeout": 60_000_000}))
    limit = engine.service.admission.limits["scale"]
    limit.in_flight += 10_000_000

    def restore():
        limit.in_flight -= 10_000_000

    return restore


def test_keys_and_client_ids_reach_the_engine():
    with (
        running([scale_model(batch=(1,))], keys={"alice": "secret", "router": "other"}) as engine,
        routing({"e": engine.url}, key="other") as router,
    ):
        router.wait_until(lambda: router.router.ready)
        engine.engine.tenant("alice")
        assert ask(router, "POST", INFER, body())[0] == 401
        check(ask(router, "POST", INFER, body(), {"X-API-Key": "secret", "X-Client-Id": "c"}))
        assert engine.engine.tenants["alice"]["completed"] == 1
        for method, path in (
            ("GET", "/metrics"), ("GET", "/v2/cluster"), ("GET", "/v2/models/scale/ready"),
            ("POST", "/v2/repository/index"), ("GET", "/v2/models/stats"), ("GET", "/v2/models/scale"),
        ):  # fmt: skip
            data = b"" if method == "POST" else None
            assert ask(router, method, path, data)[0] == 401
            assert ask(router, method, path, data, {"X-API-Key": "\xff"})[0] == 401
            assert ask(router, method, path, data, {"Authorization": "Bearer secret"})[0] == 200
        assert ask(router, "GET", "/v2/health/ready")[0] == 200
        engine.call(engine.server.stop())
        router.wait_until(lambda: not router.router.views["e"].up)
        assert ask(router, "GET", "/v2/cluster", None, {"X-API-Key": "secret"})[0] == 503  # nobody knows that key now
        assert ask(router, "GET", "/v2/cluster", None, {"X-API-Key": "other"})[0] == 200
        for key, status in (("secret", 503), ("other", 200), ("wrong", 503), ("\xff", 503)):
            assert ask(router, "GET", "/metrics", None, {"X-API-Key": key})[0] == status
        answer = ask(router, "GET", "/metrics", None, {"Authorization": "Bearer secret"})
        assert answer[0] == 200  # an engine accepted it before


def test_clients_are_told_apart_by_their_header_where_there_are_no_keys():
    with running([scale_model(batch=(1,))]) as engine, routing({"e": engine.url}) as router:
        engine.engine.tenant("c")
        router.wait_until(lambda: router.router.ready)
        for headers in ({"X-Client-Id": "c"}, {"X-Client-Id": "c", "Content-Encoding": "identity"}, {}):
            check(ask(router, "POST", INFER, body(), headers))
        assert engine.engine.tenants["c"]["completed"] == 2


def test_draining_is_not_seen_by_clients(engines):
    """An engine stops under load: every answer is there, and is right."""
    with running([scale_model(batch=(1, 4))], grace_s=0.3) as leaving:
        urls = {"leaving": leaving.url, "b": engines["b"].url}
        with routing(urls) as router:
            router.wait_until(lambda: all(view.up for view in router.router.views.values()))
            with asking(router) as answers:
                router.wait_until(lambda: len(answers) > 50)
                leaving.call(leaving.server.stop())
                n = len(answers)
                router.wait_until(lambda: len(answers) > n + 50)
                router.wait_until(lambda: router.router.views["leaving"].why.startswith("ended"))
        assert {status for status, *_ in answers} == {200}
        assert {engine for _, engine in answers} == {"leaving", "b"}


def test_an_engine_that_does_not_listen_yet_is_starting(engines):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        later = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with routing({"later": later, "b": engines["b"].url}) as router:
            router.wait_until(lambda: router.router.views["later"].why.startswith("starting"))


class Deaf:
    """A server that publishes an outlook, takes requests, and ends the connection without an answer, or is silent."""

    def __init__(self, silent):
        self._silent, self.taken = silent, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._streams = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            data = connection.recv(1 << 16)
            if data.startswith(b"GET"):
                line = (
                    b'{"ready":true,"draining":false,"live":0,"in_flight":0,"held_bytes":0,"budget_bytes":0,"since":1,'
                    b'"models":{"scale":{"state":"READY","predicted_ms":0.0}}}\n'
                )
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + line)
                self._streams.append(connection)
                return
            self.taken += 1
            if self._silent:
                self._streams.append(connection)
            else:
                connection.close()

    def close(self):
        self._socket.close()
        for each in self._streams:
            each.close()


@pytest.mark.parametrize("silent", [False, True])
def test_a_lost_request_is_sent_again_unless_it_is_marked(engines, silent):
    deaf = Deaf(silent)
    with contextlib.closing(deaf), routing({"deaf": deaf.url, "b": engines["b"].url}, silent_s=0.3) as router:
        router.wait_until(lambda: all(view.outlook for view in router.router.views.values()))
        router.router.views["deaf"].up = True
        status, headers, said = ask(router, "POST", INFER, body(parameters={"timeout": 30_000_000}))
        check((status, headers, said))
        assert headers["X-Engine"] == "b"
        assert (deaf.taken, router.router.counts.lost, router.router.counts.again) == (1, 1, 1)
        router.router.views["deaf"].up = True
        router.router.views["deaf"].quiet_ticks, router.router.views["deaf"].silent = 0, False
        status, headers, said = ask(router, "POST", INFER, body(), {"X-At-Most-Once": "1"})
        assert (status, deaf.taken) == (503, 2)
        assert "not sent again" in said["error"]


def test_the_last_engine_is_given_more_time_than_one_of_several():
    """On a busy machine all may be silent at once."""
    deaf, other = Deaf(silent=True), Deaf(silent=True)
    with (
        contextlib.closing(deaf),
        contextlib.closing(other),
        routing({"deaf": deaf.url, "other": other.url}, silent_s=0.1) as router,
    ):
        views = router.router.views
        router.wait_until(lambda: all(view.outlook for view in views.values()))
        router.wait_until(lambda: sum(view.silent for view in views.values()) == 1)
        last = next(view for view in views.values() if not view.silent)
        assert last.up
        router.wait_until(lambda: last.silent)
        assert last.quiet_ticks >= 4 * 2


def test_requests_wait_for_an_engine_and_for_their_deadline(engines):
    with routing({}, models=("scale",), hold_s=30.0) as router:
        status, _, said = ask(router, "POST", INFER, body(parameters={"timeout": 50_000}))
        assert status == 503
        assert "no engine" in said["error"]
        assert ask(router, "GET", "/v2/health/ready")[0] == 503
        answers = []
        thread = threading.Thread(target=lambda: answers.append(ask(router, "POST", INFER, body())))
        thread.start()
        router.wait_until(lambda: router.router.counts.held == 2)
        router.set_engines({"b": engines["b"].url})
        thread.join()
        check(answers[0])


def test_a_router_that_has_not_heard_its_engines_yet_calls_no_model_unknown(engines):
    with routing({"b": engines["b"].url}) as router:  # and is asked at once
        status, _, said = ask(router, "POST", "/v2/models/none/infer", body())
        assert status == 404
        assert "'none'" in said["error"]
        assert "scale" in said["error"]
    with routing({"b": engines["b"].url}) as router:
        check(ask(router, "POST", INFER, body()))


def test_two_engines_at_one_address_are_refused(engines):
    with routing({}) as router, pytest.raises(ArgumentError, check=lambda e: e.field == "engines"):
        router.set_engines({"a": engines["a"].url, "b": engines["a"].url})
    with pytest.raises(ArgumentError, check=lambda e: (e.field, e.given) == ("url", "nowhere")):
        _ = Member("a", "nowhere").address


def test_an_outlook_can_be_asked_for_once(engines):
    status, _, said = ask(engines["a"], "GET", "/v2/outlook")
    assert status == 200
    assert said["models"]["scale"]["predicted_ms"] > 0
    assert ask(engines["a"], "GET", "/v2/outlook?every_ms=0")[0] == 400


def outlook(**models):
    nothing = dict.fromkeys(("live", "in_flight", "held_bytes", "budget_bytes"), 0)
    return Outlook(ready=True, draining=False, since=1.0, models=models, **nothing)


def test_views_correct_what_was_published_by_what_they_send_and_hear():
    view = EngineView(Member("e", "http://h:1"))
    assert view.estimate_ms("m") is None
    view.hear(outlook(m=ModelOutlook(state="READY", predicted_ms=2.0, step_ms=0.5)))
    view.note_sent("m")
    assert view.estimate_ms("m") == 2.5
    assert view.cost_ms("m") == 2 * 0.5 + 0.25 * 2.5  # it would be the second there
    view.hear(outlook(m=ModelOutlook(state="READY", predicted_ms=3.0, step_ms=0.5)))
    assert view.estimate_ms("m") == 3.0
    for _ in range(100):
        view.note_answer("m", 3.0, 9.0)  # three times as slow as it says
    assert view.estimate_ms("m") == pytest.approx(9.0)
    assert view.cost_ms("m") == pytest.approx(0.5 * 3.0 / 2.0 + 0.25 * 9.0)
    view.outstanding = 0
    for _ in range(2000):  # nobody asks it any more: it gets another chance
        view.hear(outlook(m=ModelOutlook(state="READY", predicted_ms=3.0)))
    assert view.estimate_ms("m") < 3.1
    view.hear(outlook(m=ModelOutlook(state="LOADING")))
    assert view.estimate_ms("m") is None


def test_a_request_goes_back_to_an_engine_that_lost_it_and_is_there_again():
    """All engines may be silent for a moment, one after another; who refuses it is not asked twice."""
    ready = outlook(m=ModelOutlook(state="READY", predicted_ms=1.0))

    async def run():
        router, sent = Router(models=["m"]), []
        answer = asyncio.get_running_loop().create_future()
        for name in "ab":
            view = router.views[name] = EngineView(Member(name, "http://h:1"))
            view.pool = types.SimpleNamespace(send=lambda work, view=view: sent.append(view))
            view.hear(ready)
        work = Forward(router, "m", b"POST / HTTP/1.1\r\n\r\n", answer)
        work.start(b"{}")
        first = sent[-1]
        (other,) = set(router.views.values()) - {first}

        def lose():
            work.lost(True, ConnectionResetError())

        lose()
        assert sent == [first, other]
        first.hear(ready)
        lose()
        assert sent == [first, other, first]
        lose()
        assert (len(sent), answer.done()) == (3, False)  # it waits
        router.hear(other, ready)
        assert sent[3:] == [other]
        work.answered(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", [b""])
        assert (len(sent), (await answer)[0][:12]) == (4, b"HTTP/1.1 503")

    asyncio.run(run())


names = st.text('a"\\é', max_size=5)


@given(st.integers(1, 10**9), st.binary(max_size=20), st.dictionaries(names, st.integers(), max_size=3))
def test_a_request_sent_again_keeps_all_but_its_time(timeout_us, tail, parameters):
    timed = {**parameters, "timeout": timeout_us}
    fields = {"inputs": [{"name": "x", "data": [1.5, 2]}], "parameters": timed, "id": "é"}
    text = json.dumps(fields).encode()
    head = (
        f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(text) + len(tail)}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    ).encode()
    assert timeout_s(head, text + tail) == pytest.approx(timeout_us * 1e-6)
    head, whole = with_timeout(head, text + tail, 0.25)
    lengths = [int(line.rpartition(b" ")[2]) for line in head.split(b"\r\n")[1:3]]
    assert lengths[0] == len(whole)
    assert whole[lengths[1] :] == tail
    again = json.loads(whole[: lengths[1]])
    assert again == {**fields, "parameters": {**parameters, "timeout": 250_000}}
