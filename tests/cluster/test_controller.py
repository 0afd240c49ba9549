"""Models that move: loaded at their new place before they leave the old one, and no more often than the load
requires.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
from engine_models import scale_model
from router_server import asking, routing
from serving_server import running

from paellapy.cluster.cluster_file import ClusterFile, ClusterSettings
from paellapy.cluster.controller import Placer
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, save_profiles
from paellapy.serving.registry import READY, Entry, entry_of


def cluster(models, folder="", key=None, **settings):
    return ClusterFile(
        settings=ClusterSettings(**settings), engine={}, models=list(models), folder=str(folder), key=key
    )


@contextlib.contextmanager
def engine(*loaded, **options):
    """An engine that knows both models and has some of them loaded."""
    entries = [entry_of(scale_model(name, batch=(1,))) for name in ("scale", "other")]
    for each in entries:
        each.wanted = each.name in loaded
    with running(entries, **options) as found:
        yield found


def states(servers):
    return {
        name: {model for model, entry in server.server.registry.entries.items() if entry.state == READY}
        for name, server in servers.items()
    }


@pytest.mark.parametrize("key", [None, "secret"])
def test_models_change_places_and_are_never_missed(key):
    keys = {"client": "other", "cluster": key} if key else None
    with engine("scale", keys=keys) as a, engine("other", keys=keys) as b:
        servers = {"a": a, "b": b}
        urls = {name: each.url for name, each in servers.items()}
        wanted = {"a": ("other",), "b": ("scale",)}
        placer = Placer(cluster(["scale", "other"], key=key))
        headers = {"X-At-Most-Once": "1", **({"X-API-Key": "other"} if key else {})}
        with routing(urls, ("scale", "other"), key=key) as router:
            router.wait_until(lambda: router.router.ready)
            with asking(router, 2, headers) as answers:
                pause = threading.Event()
                while states(servers) != {"a": {"other"}, "b": {"scale"}}:
                    placer.place(urls, wanted)
                    assert set().union(*states(servers).values()) == {"scale", "other"}
                    pause.wait(0.01)
                router.wait_until(lambda: {name for _, name in answers[-4:]} == {"b"})
            assert {status for status, _ in answers} == {200}
            assert {name for _, name in answers} == {"a", "b"}
        assert not placer.why


def test_nothing_is_unloaded_before_all_is_where_it_is_wanted():
    """One engine does not answer, and one model cannot be made: the other stays."""

    def make():
        raise ValueError("its weights are gone")

    with running([entry_of(scale_model(batch=(1,))), Entry("gone", make, wanted=False)]) as server:
        placer, servers = Placer(cluster(["scale", "gone"])), {"a": server}
        placer.place({"a": server.url}, {"a": (), "b": ("scale",)})
        for _ in range(2):
            placer.place({"a": server.url}, {"a": ("gone",)})
            server.wait_until(lambda: "its weights are gone" in placer.why.get("a/gone", ""))
        assert states(servers) == {"a": {"scale"}}


class Loads:
    """A cluster as a controller sees it: requests counted by its routers, a clock, and the models' places."""

    def __init__(self, folder, engines):
        heavy = [SegmentProfile(400e3)]
        profiles = [ModelProfile(name, {1: heavy}, target_ms=4.0, instances=4) for name in ("m", "n")]
        save_profiles(folder / "profiles.json", profiles)
        file = cluster(
            ["m", "n"], folder, replan_s=10.0, profiles="profiles.json", gpu_gb=1.0, memory_gb={"m": 1, "n": 1}
        )
        self.now, self.counts = 0.0, {"m": 0, "n": 0}
        self.placer = Placer(file, clock=lambda: self.now)
        self.placed = dict(engines)

    def pass_time(self, seconds, **rates):
        """Advances the clock; returns another placement, or None."""
        self.now += seconds
        for name, rate in rates.items():
            self.counts[name] += int(rate * seconds)
        half = {name: count // 2 for name, count in self.counts.items()}
        rest = {name: count - half[name] for name, count in self.counts.items()}
        routers = {"router-0": {"by_model": half}, "router-1": {"by_model": rest}}
        found = self.placer.replan(routers, self.placed)
        if self.placer._planning is not None:
            self.placer._planning.result()
            found = self.placer.replan(routers, self.placed)
        if found is not None:
            self.placed = found
        return found

    def replicas(self, name):
        return sum(name in models for models in self.placed.values())


def test_placement_follows_the_load_with_few_moves_and_then_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("paellapy.cluster.plan.REQUESTS", 4000)
    loads = Loads(tmp_path, {"a": ("m",), "b": ("m",), "c": ("m",), "d": ("n",)})
    assert loads.pass_time(5, m=20_000, n=100) is None  # too early
    assert loads.pass_time(10, m=20_000, n=100) is None  # nothing to compare with
    assert loads.pass_time(10, m=20_000, n=100) is None  # it fits the load
    found = loads.pass_time(10, m=100, n=20_000)
    assert (loads.replicas("m"), loads.replicas("n")) == (1, 3)
    assert found["d"] == ("n",)  # stays where it is
    for _ in range(3):
        assert loads.pass_time(10, m=100, n=20_000) is None
    assert loads.pass_time(10) is None  # nobody asks: no reason to move
