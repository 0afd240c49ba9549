"""The text of a cluster file, as tests of clusters and of their files use it."""

KEY = "for tests only"
CONFIG = """
device = "virtual:h200"
[cluster]
engines = 1
port = {port}
resource = "virtual_gpu"
engine_host = "127.0.0.1"
hung_s = 3.0
[keys]
tests = "env:PAELLAPY_TEST_KEY"
[server]
grace_s = 0.2
drain_s = 2.0
[[models]]
name = "scale"
factory = "served_models:plain"
"""
SPARE = '[[models]]\nname = "spare"\nfactory = "served_models:spare"\n'
