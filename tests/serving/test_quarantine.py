"""Requests that were on the GPU when it failed: who is blamed, and who is not."""

from __future__ import annotations

import numpy as np
import pytest
from engine_models import lookup_model

from paellapy.scheduler.core.errors import RequestFailedError, SuspectError
from paellapy.scheduler.engine.client import digest_of
from paellapy.serving.quarantine import MOST_REQUESTS, Quarantine, quarantine_table

MODEL = lookup_model()


def inputs(*values):
    return {"i": np.array(values, np.int64)[:, None]}


def seen(quarantine, value, others, failure=1, waiting=()):
    """Whether a request that was on the GPU with this number of others, when it failed, is blamed. Its items `waiting`
    were not there.
    """
    values = value if isinstance(value, tuple) else (value,)
    digests = tuple(digest_of("lookup", {"i": np.array([each])}) for each in values)
    error, every = SuspectError("lost", digests, others, failure), (*values, *waiting)
    return isinstance(quarantine.blame(error, MODEL, inputs(*every), len(every)), RequestFailedError)


def test_who_was_alone_did_it():
    quarantine = Quarantine()
    assert not quarantine
    assert seen(quarantine, 99, others=0)
    assert quarantine
    with pytest.raises(RequestFailedError):
        quarantine.check(MODEL, inputs(1, 99), 2)
    assert quarantine.check(MODEL, inputs(1, 98), 2) == []


def test_of_several_it_is_who_was_there_twice_unless_it_was_answered_in_between():
    quarantine = Quarantine()
    assert [seen(quarantine, value, others=2) for value in (1, 2, 99)] == [False] * 3
    suspected = quarantine.check(MODEL, inputs(1), 1)
    assert len(suspected) == 1
    quarantine.clear(suspected)  # it came again, and was answered
    assert [seen(quarantine, value, others=1, failure=2) for value in (1, 99)] == [False, True]
    assert quarantine.check(MODEL, inputs(2), 1)
    with pytest.raises(RequestFailedError):
        quarantine.check(MODEL, inputs(99), 1)


def test_requests_of_the_same_content_count_once_at_a_failure():
    """Many clients may send what is right, beside one who does not."""
    table = quarantine_table()
    workers = Quarantine(table), Quarantine(table)
    assert not any(seen(each, value, others=6) for value in (1, 1, 99, 1) for each in workers)
    assert workers[0].check(MODEL, inputs(1), 1)
    assert seen(workers[1], 1, others=6, failure=2)


def test_all_workers_know_and_the_oldest_are_forgotten():
    table = quarantine_table()
    one, other = Quarantine(table), Quarantine(table)
    seen(one, 99, others=0)
    with pytest.raises(RequestFailedError):
        other.check(MODEL, inputs(99), 1)
    for value in range(100, 100 + MOST_REQUESTS):
        seen(other, value, others=0)
    assert one.check(MODEL, inputs(99), 1) == []
    with pytest.raises(RequestFailedError):
        one.check(MODEL, inputs(100), 1)


def test_of_a_request_that_is_to_blame_the_items_are_not():
    for failures in ([0], [3, 3]):  # alone on the GPU; twice beside others
        quarantine = Quarantine()
        for failure, others in enumerate(failures, 1):
            blamed = seen(quarantine, (1, 99), others, failure)
        assert blamed
        with pytest.raises(RequestFailedError):
            quarantine.check(MODEL, inputs(1, 99), 2)
        quarantine.check(MODEL, inputs(1), 1)
        quarantine.check(MODEL, inputs(99, 1), 2)


def test_an_item_that_fails_in_other_company_is_to_blame():
    quarantine = Quarantine()
    assert not seen(quarantine, (1, 99), others=2, failure=1)
    quarantine.clear(quarantine.check(MODEL, inputs(1), 1))
    assert seen(quarantine, (99, 2), others=2, failure=2)
    with pytest.raises(RequestFailedError):
        quarantine.check(MODEL, inputs(99), 1)
    assert quarantine.check(MODEL, inputs(1), 1) == []


def test_a_request_that_was_alone_with_a_part_of_its_items_is_to_blame_and_no_item_is():
    quarantine = Quarantine()
    assert seen(quarantine, (1, 99), others=0, waiting=(5, 6))
    with pytest.raises(RequestFailedError):
        quarantine.check(MODEL, inputs(1, 99, 5, 6), 4)
    for each in (1, 99, 5):
        assert quarantine.check(MODEL, inputs(each), 1) == []
