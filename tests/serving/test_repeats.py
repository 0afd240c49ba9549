"""A request whose JSON was seen before means what it meant then, and its answer reads the same."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving import protocol
from paellapy.serving.errors import RequestError
from paellapy.serving.protocol import Request, decode, encode

DTYPES = ("float32", "int8", "float64", "bool", "uint16")


def make_model(dtypes, **options):
    specs = {f"t{k}": TensorSpec((k + 1, 2), np.dtype(dtype)) for k, dtype in enumerate(dtypes)}
    return Model("m", lambda w, i, o: None, inputs=specs, outputs=specs, batch=(1, 4), **options)


NAMES = {"float32": "FP32", "int8": "INT8", "float64": "FP64", "bool": "BOOL", "uint16": "UINT16"}


def make_request(model, items, parameters, number=""):
    """JSON and tensors, all binary."""
    tensors, arrays = [], {}
    rng = np.random.default_rng()
    for name, spec in model.inputs.items():
        array = rng.integers(0, 2, (items, *spec.shape)).astype(spec.dtype)
        size = {"binary_data_size": array.nbytes}
        tensors.append(
            {"name": name, "datatype": NAMES[spec.dtype.name], "shape": list(array.shape), "parameters": size}
        )
        arrays[name] = array
    body = {"inputs": tensors, "parameters": parameters, "id": number}
    return json.dumps(body).encode(), arrays


def read(model, header, arrays):
    return decode(model, header + b"".join(a.tobytes() for a in arrays.values()), str(len(header)))


def facts(request: Request):
    return request.id, request.items, request.batched, request.outputs, request.priority, request.timeout_us


def written(model, request, results):
    pieces, length = encode(model, "1", request, results)
    return b"".join(pieces), length


@given(
    dtypes=some.lists(some.sampled_from(DTYPES), min_size=1, max_size=3),
    items=some.integers(1, 4),
    binary=some.booleans(),
    priority=some.none() | some.integers(0, 20),
    number=some.text(max_size=5),
)
def test_seen_before_or_not_it_is_the_same_request_and_answer(dtypes, items, binary, priority, number):
    parameters = {"binary_data_output": binary, "timeout": 5}
    if priority is not None:
        parameters["priority"] = priority
    model = make_model(dtypes, priority=3)
    header, _ = make_request(model, items, parameters, number)
    for _ in range(3):
        _, arrays = make_request(model, items, parameters, number)
        again, first = read(model, header, arrays), read(make_model(dtypes, priority=3), header, arrays)
        assert facts(again) == facts(first)
        for name, array in arrays.items():
            assert again.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(again.inputs[name], array)
        assert written(model, again, arrays) == written(model, first, arrays)


def test_json_that_was_right_with_its_tensors_is_wrong_with_fewer_or_more():
    model = make_model(["float32"])
    header, arrays = make_request(model, 2, {})
    assert read(model, header, arrays).repeated is not None
    assert read(model, header, arrays).repeated is read(model, header, arrays).repeated
    body = header + arrays["t0"].tobytes()
    for wrong, field in ((body[:-1], "inputs.t0.binary_data_size"), (body + b"1", "body")):
        with pytest.raises(RequestError) as caught:
            decode(model, wrong, str(len(header)))
        assert caught.value.field == field


def test_another_model_of_the_same_name_reads_for_itself():
    header, arrays = make_request(make_model(["float32"]), 1, {})
    assert read(make_model(["float32"]), header, arrays).repeated is not None
    with pytest.raises(RequestError) as caught:
        read(make_model(["float64"]), header, arrays)
    assert (caught.value.limit, caught.value.given) == ("FP64", "FP32")


def test_what_is_remembered_is_bounded_and_goes_with_the_model():
    model = make_model(["int8"])
    for k in range(3 * protocol.REMEMBERED):
        read(model, *make_request(model, 1, {}, str(k)))
        assert len(protocol._repeats[id(model)]) <= protocol.REMEMBERED
    long, arrays = make_request(model, 1, {}, "x" * protocol.LONGEST)
    assert read(model, long, arrays).repeated is None
    before = len(protocol._repeats)
    del model
    gc.collect()
    assert len(protocol._repeats) < before


def in_json(model, arrays, parameters, before="", after=""):
    """A request with its tensors as lists of numbers, and more text around the first one."""
    tensors = []
    for name, array in arrays.items():
        data = json.dumps(array.reshape(-1).tolist())
        kind, shape = NAMES[array.dtype.name], list(array.shape)
        tensors.append(f'{{"name":"{name}","datatype":"{kind}",{before}"shape":{shape},"data": {data}{after}}}')
    return f'{{"inputs": [{", ".join(tensors)}], "parameters": {json.dumps(parameters)}}}'.encode()


@given(
    dtypes=some.lists(some.sampled_from(DTYPES), min_size=1, max_size=2),
    items=some.integers(1, 4),
    binary=some.booleans(),
)
def test_numbers_in_json_are_read_anew_and_the_rest_is_known(dtypes, items, binary):
    model, parameters = make_model(dtypes), {"binary_data_output": binary}
    for k in range(3):
        _, arrays = make_request(model, items, parameters)
        body = in_json(model, arrays, parameters)
        again, first = decode(model, body, None), decode(make_model(dtypes), body, None)
        assert facts(again) == facts(first)
        assert (again.repeated is not None) == (len(dtypes) == 1)
        for name, array in arrays.items():
            assert again.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(again.inputs[name], array)
        assert written(model, again, arrays) == written(model, first, arrays)
        if len(dtypes) == 1 and k:
            assert again.repeated is decode(model, body, None).repeated


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"parameters":{"data":[0,0]},', ""),  # a list that is somebody else's
        ("", ',"parameters":{"data":[0,0]}'),
        ('"parameters":{"a":"\\"data\\":[0,0]"},', ""),
        ('"parameters":{"a":"data"},', ""),
    ],
)
def test_only_the_tensors_own_list_may_differ(before, after):
    model = make_model(["float32"])
    for k in range(3):
        array = np.full((1, 1, 2), k, np.float32)
        body = in_json(model, {"t0": array}, {}, before.replace("0,0", f"{k}.0, {k}.0"), after)
        np.testing.assert_array_equal(decode(model, body, None).inputs["t0"], array)
    other = body.replace(b"[2.0, 2.0]", b"[7.0, 7.0]", 1)
    expected = decode(make_model(["float32"]), other, None).inputs["t0"]
    np.testing.assert_array_equal(decode(model, other, None).inputs["t0"], expected)


@pytest.mark.parametrize("text", ["[1, 2, 3]", "[1,, 2]", '["1", 2]', "[1, 1e39]", "[1, true]", "[[1, 2]", "[1, 2}"])
def test_wrong_numbers_are_told_as_if_nothing_were_known(text):
    model = make_model(["float32"])
    body = in_json(model, {"t0": np.ones((1, 1, 2), np.float32)}, {})
    assert decode(model, body, None).repeated is not None
    wrong = body.replace(b"[1.0, 1.0]", text.encode())
    said = []
    for each in (model, make_model(["float32"])):
        with pytest.raises(RequestError) as caught:
            decode(each, wrong, None)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_numbers_are_rounded_as_numpy_does_and_never_to_infinity():
    for name in ("float16", "float32", "float64"):
        dtype = np.dtype(name)
        model = Model("m", lambda w, i, o: None, inputs={"x": TensorSpec((3,), dtype)}, outputs={"y": TensorSpec((1,))})
        kind = {"float16": "FP16", "float32": "FP32", "float64": "FP64"}[name]
        values = [0.1, -1 / 3, float(np.finfo(dtype).max)]

        def body(values, kind=kind):
            tensor = {"name": "x", "shape": [1, 3], "datatype": kind, "data": values}
            return json.dumps({"inputs": [tensor]}).encode()

        found = decode(model, body(values), None).inputs["x"][0]
        np.testing.assert_array_equal(found, np.array(values).astype(dtype))
        if name != "float64":
            with pytest.raises(RequestError) as caught:
                decode(model, body([0.0, 0.0, 1.01 * values[2]]), None)
            assert (caught.value.field, caught.value.limit) == ("inputs.x.data", kind)


@given(
    dtypes=some.lists(some.sampled_from(("float32", "int8", "float64", "uint16")), min_size=1, max_size=3),
    backwards=some.booleans(),
)
def test_the_bytes_of_a_known_request_are_those_of_its_arrays_in_the_models_order(dtypes, backwards):
    model = make_model(dtypes)
    header, arrays = make_request(model, 1, {})
    if backwards:
        body = json.loads(header)
        body["inputs"].reverse()
        header, arrays = json.dumps(body).encode(), dict(reversed(arrays.items()))
    whole = header + b"".join(a.tobytes() for a in arrays.values())
    for _ in range(2):  # the JSON is known at the second
        request = decode(model, whole, str(len(header)), as_bytes=True)
    assert request.tail is not None
    assert request.repeated is not None
    pieces = request.repeated.pieces(model.inputs, request.tail)
    assert [bytes(each) for each in pieces] == [arrays[name].tobytes() for name in model.inputs]
    for name, array in request.arrays().items():
        np.testing.assert_array_equal(array, arrays[name])


def test_values_are_checked_also_where_the_json_is_known():
    specs = {"x": TensorSpec((2,), np.dtype("int32"), low=0, high=5)}
    model = Model("m", lambda w, i, o: None, inputs=specs, outputs=specs, batch=(1, 4))
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    header = json.dumps({"inputs": [tensor]}).encode()
    for _ in range(2):
        decode(model, header + np.array([1, 2], np.int32).tobytes(), str(len(header)), as_bytes=True)
    with pytest.raises(InputError) as caught:
        decode(model, header + np.array([1, 99], np.int32).tobytes(), str(len(header)), as_bytes=True)
    assert (caught.value.field, caught.value.limit) == ("x", (0, 5))
