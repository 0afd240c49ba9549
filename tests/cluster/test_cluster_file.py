"""Files of clusters: those that are refused, what they place where, and what changes from one to another."""

from __future__ import annotations

import pytest
from cluster_text import CONFIG, SPARE

from paellapy.cluster.cluster_file import difference, first_placement, load_cluster
from paellapy.serving.errors import ConfigError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("[server]", "[cluster.replicas]\nother = 1\n[server]", "cluster.replicas"),
        ("served_models:plain", "served_models:nothing", None),
        ("engines = 1", "engines = 0", None),
        ("engines = 1", "replan_s = 5.0", "cluster.replan_s"),
        ("engines = 1", 'replan_s = 5.0\nprofiles = "none.json"', "cluster.profiles"),
        ("engines = 1", "engines = 3\nmax_engines = 2", "cluster.max_engines"),
        ("127.0.0.1", "192.0.2.77", "cluster.engine_host"),
        ('"virtual:h200"', '"virtual:h2000"', "device"),
        ('device = "virtual:h200"', "device = ", None),
        ("drain_s = 2.0", "drain = 2.0", None),
        ("env:PAELLAPY_TEST_KEY", "env:PAELLAPY_NO_KEY", None),
        ("tests = ", "paellapy-cluster = ", "keys"),
        ("[server]", '[tls]\ncertificate = "a"\nkey = "b"\n[server]', "tls"),
    ],
)
def test_files_without_sense_are_refused(tmp_path, old, new, field):
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG.format(port=8000).replace(old, new))
    with pytest.raises(ConfigError, check=lambda e: field in (None, e.field)):
        load_cluster(file)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        load_cluster(file)


def test_a_file_keeps_the_clusters_key_and_shows_no_others(tmp_path, monkeypatch):
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG.format(port=8000))
    first = load_cluster(file)
    monkeypatch.setenv("PAELLAPY_TEST_KEY", "another one")
    assert difference(first, load_cluster(file, first.key)) == ["keys.tests.key: changed"]


def test_models_are_dealt_out(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(CONFIG.format(port=8000).replace("[server]", "[cluster.replicas]\nspare = 1\n[server]") + SPARE)
    placement = first_placement(load_cluster(file), 3)
    assert [name for each in placement for name in each].count("scale") == 3
    assert [name for each in placement for name in each].count("spare") == 1
