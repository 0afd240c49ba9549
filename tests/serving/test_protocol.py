"""Bodies of the protocol: what is right is read exactly, what is wrong is a 400 that says so, whatever it is."""

from __future__ import annotations

import json
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving import tensors
from paellapy.serving.compression import choose_coding
from paellapy.serving.errors import RequestError
from paellapy.serving.protocol import DEFAULT_LEVEL, PRIORITY_LEVELS, classify, decode, encode
from paellapy.serving.tensors import DTYPES


def model_of(**inputs):
    specs = {key: TensorSpec(shape, DTYPES[datatype]) for key, (datatype, shape) in inputs.items()}
    return Model("m", lambda w, i, o: None, inputs=specs, outputs=specs, batch=(1, 8))


WHERE = tensors.Where("m", "x")
VECTOR = model_of(x=("FP32", (4,)))
PAIR = model_of(a=("INT8", (2, 3)), b=("FP64", ()))


def tensor(name="x", shape=(1, 4), datatype="FP32", data=(1, 2, 3, 4), **more):
    found = {"name": name, "shape": list(shape), "datatype": datatype, "data": data, **more}
    return {key: value for key, value in found.items() if value is not None}


def read(model, body, tail=b"", header_length=None):
    header = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decode(model, header + tail, str(len(header)) if tail and header_length is None else header_length)


def test_json_flat_and_nested_are_the_same():
    flat = read(VECTOR, {"inputs": [tensor(shape=(2, 4), data=list(range(8)))]})
    nested = read(VECTOR, {"inputs": [tensor(shape=(2, 4), data=[[0, 1, 2, 3], [4, 5, 6, 7]])]})
    np.testing.assert_array_equal(flat.inputs["x"], nested.inputs["x"])
    assert flat.items == 2
    assert flat.batched


def test_one_item_may_come_without_a_batch_axis():
    found = read(VECTOR, {"inputs": [tensor(shape=(4,))], "id": "7"})
    assert (found.items, found.batched, found.id) == (1, False, "7")
    pieces, _ = encode(VECTOR, "1", found, {"x": found.inputs["x"]})
    assert json.loads(b"".join(pieces))["outputs"][0]["shape"] == [4]


def test_priority_and_timeout():
    found = read(VECTOR, {"inputs": [tensor()], "parameters": {"priority": 2, "timeout": 1500}})
    assert (found.priority, found.timeout_us) == (DEFAULT_LEVEL - 2, 1500)
    assert read(VECTOR, {"inputs": [tensor()], "parameters": {"timeout": 0}}).timeout_us is None


def test_priorities_are_tritons_one_goes_first_and_zero_is_none():
    important = Model("m", VECTOR.fn, inputs=VECTOR.inputs, outputs=VECTOR.outputs, priority=7)

    def engines(model, level):
        return read(model, {"inputs": [tensor()], "parameters": {"priority": level}}).priority

    assert [engines(VECTOR, level) for level in (1, 2, DEFAULT_LEVEL, 1000)] == [9, 8, 0, DEFAULT_LEVEL - 1000]
    assert engines(VECTOR, 0) is None
    assert engines(important, DEFAULT_LEVEL) == important.priority


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[" * 100_000, "body"),
        (b'{"inputs": [], "parameters": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "body"),
        (b"\xff\xfe", "body"),
        (b'{"inputs": [], "id": "\x80"}', "body"),
        (b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","data":["\x80"]}]}', "inputs.x.data"),
        ({}, "body"),
        ({"inputs": [tensor(name="z")]}, "inputs"),
        ({"inputs": [tensor(), tensor()]}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor(datatype="BYTES")]}, "inputs.x.datatype"),
        ({"inputs": [tensor(datatype="FP8")]}, "inputs.x.datatype"),
        ({"inputs": [tensor(datatype="INT32")]}, "inputs.x.datatype"),
        ({"inputs": [tensor(shape=(1, 5))]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=(-1, 4))]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=(0, 4), data=[])]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=())]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=[1] * 1000)]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=(10**30, 4))]}, "inputs.x.shape"),
        ({"inputs": [tensor(shape=(9, 4), data=[0] * 36)]}, "inputs.x.shape"),
        ({"inputs": [tensor("x" * 9000)]}, "inputs"),
        ({"inputs": [tensor(datatype="F" * 9000)]}, "inputs.x.datatype"),
        ({"inputs": [tensor()], "outputs": [{"name": "z" * 9000}]}, "outputs"),
        ({"inputs": [tensor(data=[1, 2, 3])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[[1, 2], [3]])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[[1, 2], 3, 4])]}, "inputs.x.data"),
        ({"inputs": [tensor(data="1234")]}, "inputs.x.data"),
        ({"inputs": [tensor(data=["1", "2", "3", "4"])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[1, 2, 3, None])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[1, 2, 3, True])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[1e300, 2, 3, 4])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=[10**400, 2, 3, 4])]}, "inputs.x.data"),
        ({"inputs": [tensor(data=None)]}, "inputs.x.data"),
        (b'{"inputs":[{"name":"x","shape":[4],"datatype":"FP32","data":[NaN,1,2,3]}]}', "body"),
        ({"inputs": [tensor(parameters={"binary_data_size": 16})]}, "inputs.x.data"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": 16})]}, "inputs.x.binary_data_size"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": 15})]}, "inputs.x.binary_data_size"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": -16})]}, "inputs.x.binary_data_size"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": "16"})]}, "inputs.x.binary_data_size"),
        ({"inputs": [tensor(data=None, parameters={"shared_memory_region": "r"})]}, "inputs.x.shared_memory_region"),
        ({"inputs": [tensor()], "outputs": [{"name": "z"}]}, "outputs"),
        ({"inputs": [tensor()], "outputs": [{"name": "x"}, {"name": "x"}]}, "outputs"),
        ({"inputs": [tensor()], "outputs": [{"name": "x", "parameters": {"binary_data": 1}}]}, "outputs.x.binary_data"),
        (
            {"inputs": [tensor()], "outputs": [{"name": "x", "parameters": {"classification": -1}}]},
            "outputs.x.classification",
        ),
        ({"inputs": [tensor()], "parameters": {"priority": 1.5}}, "parameters.priority"),
        ({"inputs": [tensor()], "parameters": {"priority": PRIORITY_LEVELS + 1}}, "parameters.priority"),
        ({"inputs": [tensor()], "parameters": {"priority": -1}}, "parameters.priority"),
        ({"inputs": [tensor()], "parameters": {"priority": True}}, "parameters.priority"),
        ({"inputs": [tensor()], "parameters": {"sequence_id": 7, "sequence_start": True}}, "parameters.sequence_id"),
        ({"inputs": [tensor()], "parameters": {"timeout": -1}}, "parameters.timeout"),
        ({"inputs": [tensor()], "parameters": {"timeout": "soon"}}, "parameters.timeout"),
        ({"inputs": [tensor()], "parameters": {"timeout": 10**16}}, "parameters.timeout"),
        ({"inputs": [tensor()], "id": 5}, "body"),
    ],
)
def test_the_wrong_part_of_a_request_is_named(body, field):
    with pytest.raises(RequestError) as caught:
        read(VECTOR, body)
    assert (caught.value.status, caught.value.field) == (400, field)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("body", "limit", "given"),
    [
        ({"inputs": [tensor(name="z")]}, ["x"], "z"),
        ({"inputs": [tensor(datatype="INT32")]}, "FP32", "INT32"),
        ({"inputs": [tensor(shape=(1, 5))]}, ("n", 4), [1, 5]),
        ({"inputs": [tensor(shape=(9, 4), data=[0] * 36)]}, 8, 9),
        ({"inputs": [tensor(data=[1, 2, 3])]}, 4, 3),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": 16})]}, 0, 16),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": 15})]}, 16, 15),
        ({"inputs": [tensor()], "parameters": {"priority": PRIORITY_LEVELS + 1}}, PRIORITY_LEVELS, PRIORITY_LEVELS + 1),
        ({"inputs": [tensor()], "parameters": {"timeout": 10**16}}, 10**15, 10**16),
    ],
)
def test_errors_have_the_limit_and_the_value(body, limit, given):
    with pytest.raises(RequestError) as caught:
        read(VECTOR, body)
    assert (caught.value.limit, caught.value.given) == (limit, given)
    assert str(limit if isinstance(limit, int | str) else given) in str(caught.value)


@pytest.mark.parametrize("length", ["", "-1", "1e3", "9" * 30, "99999", "x", "٣", "+5", "1_0"])
def test_a_header_length_that_lies(length):
    with pytest.raises(RequestError) as caught:
        read(VECTOR, {"inputs": [tensor()]}, header_length=length)
    assert caught.value.field == "Inference-Header-Content-Length"


def test_bytes_that_belong_to_nobody():
    with pytest.raises(RequestError) as caught:
        read(VECTOR, {"inputs": [tensor()]}, b"abc")
    assert (caught.value.field, caught.value.limit, caught.value.given) == ("body", 0, 3)


def test_integers_out_of_range():
    with pytest.raises(RequestError) as caught:
        read(PAIR, {"inputs": [tensor("a", (2, 3), "INT8", [0, 0, 0, 0, 0, 200]), tensor("b", (), "FP64", [1.0])]})
    assert (caught.value.field, caught.value.limit) == ("inputs.a.data", "INT8")


def test_inputs_must_agree_on_their_batch():
    with pytest.raises(RequestError) as caught:
        read(PAIR, {"inputs": [tensor("a", (2, 2, 3), "INT8", [0] * 12), tensor("b", (), "FP64", [1.0])]})
    assert caught.value.given == {"a": 2, "b": None}


def test_no_memory_is_taken_for_the_items_that_a_shape_claims():
    # Long data are compared with the brackets of the whole shape: nobody sent as many.
    data = b"[" + b",".join([b"1.000000"] * (tensors.PIECE_BYTES // 8)) + b"]"
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[100000000,4],"data":%b}]}' % data
    with (
        mock.patch.object(tensors, "_brackets", side_effect=MemoryError),
        pytest.raises(RequestError) as caught,
    ):
        read(VECTOR, body)
    assert caught.value.limit == 8


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT64", "UINT64"])
def test_the_best_classes_of_integers_come_first(datatype):
    limits = np.iinfo(DTYPES[datatype])
    scores = np.array([[limits.min, 3, limits.max, limits.max - 1]], DTYPES[datatype])
    expected = [f"{limits.max}:2", f"{limits.max - 1}:3", "3:1", f"{limits.min}:0"]
    assert classify(scores, 4)[0].tolist() == expected


def test_not_a_number_has_no_json_and_travels_as_null():
    found = read(VECTOR, {"inputs": [tensor()]})
    pieces, _ = encode(VECTOR, "1", found, {"x": np.full((1, 4), np.nan, np.float32)})
    assert json.loads(b"".join(pieces))["outputs"][0]["data"] == [None] * 4


@pytest.mark.parametrize(
    ("accepted", "json_coding", "binary_coding"),
    [
        ("gzip", "gzip", "gzip"),
        ("deflate", "deflate", "deflate"),
        ("gzip, deflate, br", "gzip", None),
        ("gzip;q=0", None, None),
        ("gzip;q=0.5", "gzip", "gzip"),
        ("br", None, None),
        ("identity", None, None),
    ],
)
def test_which_coding_is_chosen(accepted, json_coding, binary_coding):
    assert choose_coding(accepted, binary=False) == json_coding
    assert choose_coding(accepted, binary=True) == binary_coding


# -- properties

DATATYPES = some.sampled_from(list(DTYPES))
SHAPES = some.lists(some.integers(1, 3), max_size=3).map(tuple)


@given(DATATYPES, SHAPES, some.integers(1, 8), some.booleans(), some.booleans(), some.randoms(use_true_random=False))
def test_every_tensor_survives_the_way_there_and_back(datatype, shape, items, binary_in, binary_out, random):
    """Bit for bit, NaN and infinities included where they can travel."""
    model = model_of(x=(datatype, shape))
    dtype = DTYPES[datatype]
    count = items * math.prod(shape)
    if binary_in and binary_out and datatype != "BOOL":
        raw = random.randbytes(count * dtype.itemsize)
    else:
        limit = 2 if datatype == "BOOL" else 100
        raw = np.array([random.randrange(limit) for _ in range(count)]).astype(dtype).tobytes()
    array = np.frombuffer(raw, dtype).reshape(items, *shape)
    given = tensor("x", array.shape, datatype, None if binary_in else _json_list(array))
    if binary_in:
        given["parameters"] = {"binary_data_size": len(raw)}
    body = {"inputs": [given], "parameters": {"binary_data_output": binary_out}}
    found = read(model, body, raw if binary_in else b"")
    assert found.inputs["x"].tobytes() == raw
    pieces, header_length = encode(model, "1", found, {"x": found.inputs["x"]})
    whole = b"".join(pieces)
    if binary_out:
        assert whole[header_length:] == raw
    else:
        assert header_length is None
        back = np.array(json.loads(whole)["outputs"][0]["data"]).astype(dtype)
        assert back.tobytes() == raw


def _json_list(array):
    flat = array.reshape(-1)
    return (flat.astype(np.float32) if array.dtype.kind not in "biuf" else flat).tolist()


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ODD = some.one_of(
    some.integers(-3, 5), some.integers(-(2**70), 2**70), some.floats(allow_nan=False), some.text(max_size=3), JSON
)
BODIES = some.fixed_dictionaries(
    {
        "inputs": some.lists(
            some.fixed_dictionaries(
                {},
                optional={
                    "name": some.sampled_from(["x", "x", "y", ""]) | JSON,
                    "shape": some.sampled_from([[1, 4], [4], [2, 4]]) | some.lists(ODD, max_size=4) | JSON,
                    "datatype": DATATYPES | some.just("FP32") | some.just("BYTES") | JSON,
                    "data": some.lists(ODD, max_size=9) | some.just([1, 2, 3, 4]) | JSON,
                    "parameters": some.dictionaries(
                        some.sampled_from(["binary_data_size", "shared_memory_region", "z"]), ODD, max_size=2
                    ),
                },
            ),
            max_size=3,
        )
        | JSON
    },
    optional={
        "id": some.text(max_size=5) | JSON,
        "outputs": some.lists(some.fixed_dictionaries({"name": some.just("x")}), max_size=2) | JSON,
        "parameters": some.dictionaries(
            some.sampled_from(["priority", "timeout", "binary_data_output", "z"]), ODD, max_size=3
        )
        | JSON,
    },
)


@settings(max_examples=400)
@given(BODIES, some.binary(max_size=40), some.none() | some.integers(-5, 300).map(str) | some.text(max_size=5))
def test_no_body_is_more_than_a_400(body, tail, header_length):
    header = json.dumps(body).encode()
    try:
        found = decode(VECTOR, header + tail, header_length)
    except RequestError:
        return
    assert found.inputs["x"].shape == (found.items, 4)
    assert found.inputs["x"].dtype == np.float32


@settings(max_examples=300)
@given(some.binary(max_size=200), some.none() | some.integers(0, 200).map(str))
def test_no_bytes_are_more_than_a_400(body, header_length):
    with pytest.raises(RequestError):
        decode(VECTOR, body, header_length)


@settings(max_examples=300)
@given(some.integers(0, 60), some.integers(-40, 40), some.integers(0, 40), some.integers(0, 3))
def test_lengths_that_lie(cut, size_lie, extra, where):
    """A right binary body with one length changed, bytes cut off, or bytes too many."""
    raw = np.arange(8, dtype=np.float32).tobytes()
    size = len(raw) + (size_lie if where == 1 else 0)
    given = tensor(shape=(2, 4), data=None, parameters={"binary_data_size": size})
    header = json.dumps({"inputs": [given]}).encode()
    body = header + raw + (b"\0" * extra if where == 2 else b"")
    if where == 0:
        body = body[: len(body) - cut]
    length = len(header) + (size_lie if where == 3 else 0)
    changed = (where == 0 and cut) or (where == 1 and size_lie) or (where == 2 and extra) or (where == 3 and size_lie)
    if changed:
        with pytest.raises(RequestError):
            decode(VECTOR, body, str(length))
    else:
        assert decode(VECTOR, body, str(length)).inputs["x"].tobytes() == raw


@settings(max_examples=30)
@given(
    rows=some.integers(1, 40), columns=some.integers(1, 300), nested=some.booleans(),
    separator=some.sampled_from([",", ", ", " ,\n  "]), seed=some.integers(0, 100),
)  # fmt: skip
def test_long_numbers_read_in_pieces_are_those_read_at_once(rows, columns, nested, separator, seed):
    """Whatever the pretty printer, and also where a piece ends in the middle of a row."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    rest = [separator.join(map(repr, row.tolist())) for row in values]
    text = "[" + separator.join(f"[{row}]" if nested else row for row in rest) + "]"
    with mock.patch.object(tensors, "PIECE_BYTES", 512):
        found = tensors.numbers(text.encode(), np.dtype(np.float32), (rows, columns), WHERE)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b"[1, 2, 3, 4, 5]", 5),
        (b"[[1, 2], [3, 4], [5, 6]]", 6),
        (b"[" + b"[1]," * 1000 + b"[1]]", 1001),
        (b"[1, 2, 3, [4]]", None),
        (b"[1, 2,         3]", 3),
        (b"[1, 2, 3, 4        ,]", 5),
        (b"[1, 2, 3" + b" " * 600 + b"]", None),
        (b"[1, 2, 3" + b" " * 600 + b",]", None),
        (b"[1, 2, 3, 4" + b" " * 600 + b"}", None),
        (b"[[1, 2], [3, 4" + b" " * 600 + b"]", None),
        (b"[1, 2, 3" + b" " * 600 + b"4, 5]", None),
        (b"[1, 2, 3, " + b" " * 600 + b"1e999]", None),
    ],
)
def test_long_numbers_that_are_wrong_are_refused(text, values):
    """`values`: their number, where only that is wrong."""
    with mock.patch.object(tensors, "PIECE_BYTES", 16), pytest.raises(RequestError) as caught:
        tensors.numbers(text, np.dtype(np.float32), (2, 2), WHERE)
    assert (caught.value.field, caught.value.given) == ("inputs.x.data", values)
