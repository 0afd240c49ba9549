"""Devices for tests that run on a real GPU as they do on the virtual one."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
