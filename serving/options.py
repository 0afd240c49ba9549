"""A configuration file with overriding options from Python: `serve("config.toml", policy="edf")`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paellapy.serving.config import Config, Path_, Source, load_config
from paellapy.serving.errors import ConfigError


class _Source(Source):
    """Errors point at the file, except for values that the options set."""

    def __init__(self, file: Source, options: Mapping[str, Any]) -> None:
        super().__init__(file.name, file.text)
        self._given = list(_leaves(options))

    def error(self, path: Path_, message: str) -> ConfigError:
        given = any(path[: len(each)] == each for each in self._given)
        return Source().error(path, message) if given else super().error(path, message)


def file_with_options(file: str | Path, options: Mapping[str, Any]) -> tuple[Config, Source]:
    """As `load_config`. Tables are merged; any other option replaces the file's value."""
    config, source = load_config(file)  # reports the file's own errors with their lines
    if not options:
        return config, source
    config, _ = load_config(defaults=_merged(tomllib.loads(source.text), options))
    merged = _Source(source, options)
    merged.again = partial(file_with_options, file, options)
    return config, merged


def _merged(file: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> _merged({"policy": "edf", "server": {"port": 1, "host": "::1"}}, {"server": {"port": 2}})
    {'policy': 'edf', 'server': {'port': 2, 'host': '::1'}}
    """
    found = dict(file)
    for key, value in options.items():
        ours = found.get(key)
        found[key] = _merged(ours, value) if isinstance(ours, Mapping) and isinstance(value, Mapping) else value
    return found


def _leaves(options: Mapping[str, Any], under: Path_ = ()) -> Iterator[Path_]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*under, key))
        else:
            yield (*under, key)
