"""NVIDIA's own client, unmodified, against a real server on the virtual GPU."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import tritonclient.http as sync_client
import tritonclient.http.aio as async_client
from engine_models import scale_model
from served_models import every_datatype
from serving_processes import processes
from serving_server import INFER, ask, infer_body, running
from tritonclient.utils import InferenceServerException

from paellapy import demo
from paellapy.serving.protocol import DEFAULT_LEVEL
from paellapy.serving.tensors import DTYPES

pytestmark = pytest.mark.xdist_group("triton")  # one server of each kind


IMAGES, LABELS = demo.held_out()


@pytest.fixture(scope="module", params=[0, 2], ids=["one-process", "two-workers"])
def server(request):
    if request.param:
        with processes("served_models:every_datatype", workers=request.param) as found:
            yield found
    else:
        with running(every_datatype()) as found:
            yield found


@pytest.fixture
def client(server):
    with sync_client.InferenceServerClient(server.address, concurrency=4) as found:
        yield found


def image_input(images, binary=True):
    tensor = sync_client.InferInput("image", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images, binary_data=binary)
    return tensor


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")
    assert not client.is_model_ready("mlp", "2")
    assert not client.is_model_ready("nope")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata("mlp", "1")
    assert found["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}]
    assert found["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [-1, 10]}]


def test_configuration(client):
    found = client.get_model_config("mlp")
    assert found["max_batch_size"] == 4
    assert found["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": [8, 8]}]
    assert found["dynamic_batching"]["preferred_batch_size"] == [1, 4]
    assert 1 < found["dynamic_batching"]["default_priority_level"] < found["dynamic_batching"]["priority_levels"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_digits_are_classified_right(client, binary, coding):
    result = client.infer(
        "mlp",
        [image_input(IMAGES[:4], binary)],
        outputs=[sync_client.InferRequestedOutput("scores", binary_data=binary)],
        request_id="some id",
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
        priority=3,
        timeout=60_000_000,
    )
    assert result.get_response()["id"] == "some id"
    assert result.as_numpy("scores").argmax(1).tolist() == LABELS[:4].tolist()


def test_outputs_are_binary_unless_asked_otherwise(client):
    result = client.infer("mlp", [image_input(IMAGES[:1])])
    assert result.get_output("scores")["parameters"] == {"binary_data_size": 40}
    assert result.as_numpy("scores").argmax() == LABELS[0]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_long_answer_is_compressed_for_who_asks(client, coding):
    x = np.zeros((2, 4096), np.float32)
    tensor = sync_client.InferInput("x", [2, 4096], "FP32")
    tensor.set_data_from_numpy(x)
    result = client.infer("wide", [tensor], response_compression_algorithm=coding, request_compression_algorithm=coding)
    np.testing.assert_array_equal(result.as_numpy("y"), x)


def test_classification(client):
    result = client.infer(
        "mlp", [image_input(IMAGES[:2])], outputs=[sync_client.InferRequestedOutput("scores", class_count=3)]
    )
    texts = result.as_numpy("scores")
    assert texts.shape == (2, 3)
    assert [int(row[0].split(b":")[1]) for row in texts] == LABELS[:2].tolist()


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype_goes_there_and_back(client, server, name, binary):
    model = next(each for each in every_datatype() if each.name == name)
    rng = np.random.default_rng(1)
    arrays, tensors = {}, []
    for key, spec in model.inputs.items():
        array = rng.integers(0, 2 if key == "bool" else 100, (2, *spec.shape)).astype(spec.dtype)
        arrays[key] = array
        datatype = key.upper()
        tensor = sync_client.InferInput(key, list(array.shape), datatype)
        # The client itself has no JSON for FP16 and BF16.
        tensor.set_data_from_numpy(array, binary_data=binary or datatype in ("FP16", "BF16"))
        tensors.append(tensor)
    outputs = [sync_client.InferRequestedOutput(key, binary_data=binary) for key in arrays]
    result = client.infer(name, tensors, outputs=outputs)
    for key, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(result.as_numpy(key), np.float64), array.astype(np.float64))


def test_statistics_count(client):
    before = client.get_inference_statistics("mlp")["model_stats"][0]
    for n in (1, 3):
        client.infer("mlp", [image_input(IMAGES[:n])])
    after = client.get_inference_statistics("mlp", "1")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 4
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 2
    assert 2 <= after["execution_count"] - before["execution_count"] <= 4
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert sum(each["compute_infer"]["count"] for each in after["batch_stats"]) == after["execution_count"]
    every = client.get_inference_statistics()["model_stats"]
    assert {each["name"] for each in every} == {"mlp", "small", "large", "wide"}


def test_models_are_unloaded_and_loaded(client):
    client.unload_model("wide")
    index = {each["name"]: each for each in client.get_model_repository_index()}
    assert index["wide"]["state"] == "UNAVAILABLE"
    assert index["mlp"] == {"name": "mlp", "version": "1", "state": "READY", "reason": "", "weights": "resident"}
    assert not client.is_model_ready("wide")
    assert client.is_server_ready()
    x = sync_client.InferInput("x", [4096], "FP32")
    x.set_data_from_numpy(np.ones(4096, np.float32))
    with pytest.raises(InferenceServerException) as caught:
        client.infer("wide", [x])
    assert caught.value.status() == "404"
    client.load_model("wide")
    client.load_model("wide")  # anew
    np.testing.assert_array_equal(client.infer("wide", [x]).as_numpy("y"), np.full(4096, 2, np.float32))


def test_nothing_but_the_configured_models_is_loaded(client):
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("other")
    assert caught.value.status() == "404"
    for more in ({"config": '{"backend": "python"}'}, {"config": "{}", "files": {"file:1/model.py": b"import os"}}):
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("mlp", **more)
        assert caught.value.status() == "400"
    assert client.is_model_ready("mlp")


def test_priority_one_goes_first_and_a_large_one_after_those_without():
    """While a slot of the model's only instance is held, requests queue; then they run in the order of their priority.
    """
    finished = []

    async def main(server, held):
        async with async_client.InferenceServerClient(server.address) as client:
            x = async_client.InferInput("x", [64], "FP32")
            x.set_data_from_numpy(np.ones(64, np.float32))
            tasks = []
            for level in (20, 0, 2, 1):
                tasks.append(asyncio.create_task(client.infer("one", [x], priority=level)))
                while server.engine.stats()["queued"] < len(tasks):
                    await asyncio.sleep(0.005)
            held.cancel()
            return [(await task).as_numpy("y")[0] for task in tasks]

    with running([scale_model("one", batch=(1,), instances=1)], policy="priority") as server:
        held = server.hold("one")
        server.engine.watch(lambda entry: finished.append(int(entry["priority"])))
        assert asyncio.run(main(server, held)) == [2.0] * 4
    # After the slot that was given back.
    assert finished[1:] == [DEFAULT_LEVEL - 1, DEFAULT_LEVEL - 2, 0, DEFAULT_LEVEL - 20]


@pytest.mark.parametrize("more", [{}, {"traceparent": "none"}])  # the fast path, and aiohttp's
def test_who_gives_a_priority_hears_whether_it_counts(more):
    def warns(server, level):
        body = json.dumps(infer_body("x", np.ones((1, 64), np.float32), parameters={"priority": level})).encode()
        status, headers, _ = ask(server, "POST", INFER, body, more)
        assert status == 200
        return headers.get("Warning", "").startswith("299 ")

    with running([scale_model(batch=(1,))]) as server:
        assert [warns(server, level) for level in (0, 1, 10)] == [False, True, True]
        server.engine.set_policy("priority")
        assert not warns(server, 1)


def test_a_timeout_is_a_503(client):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("mlp", [image_input(IMAGES[:1])], timeout=1)
    assert caught.value.status() == "503"


@pytest.mark.parametrize(
    ("shape", "datatype"), [([1, 8, 9], "FP32"), ([5, 8, 8], "FP32"), ([1, 8, 8], "FP64")]
)
def test_mistakes_are_told(client, shape, datatype):
    tensor = sync_client.InferInput("image", shape, datatype)
    tensor.set_data_from_numpy(np.zeros(shape, DTYPES[datatype]))
    with pytest.raises(InferenceServerException) as caught:
        client.infer("mlp", [tensor])
    assert caught.value.status() == "400"


def test_the_asynchronous_client(server):
    async def main():
        async with async_client.InferenceServerClient(server.address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("mlp"))["name"] == "mlp"
            assert (await client.get_model_config("mlp"))["max_batch_size"] == 4
            assert len(await client.get_model_repository_index()) == 4
            assert (await client.get_inference_statistics("mlp"))["model_stats"]

            async def one(k):
                tensor = async_client.InferInput("image", [1, 8, 8], "FP32")
                tensor.set_data_from_numpy(IMAGES[k : k + 1], binary_data=k % 2 == 0)
                output = async_client.InferRequestedOutput("scores", binary_data=k % 3 == 0)
                coding = (None, "gzip", "deflate")[k % 3]
                result = await client.infer(
                    "mlp",
                    [tensor],
                    outputs=[output],
                    request_compression_algorithm=coding,
                    response_compression_algorithm=coding,
                )
                return int(result.as_numpy("scores").argmax())

            found = await asyncio.gather(*(one(k) for k in range(60)))
            assert np.mean(np.array(found) == LABELS[:60]) > 0.9
            tensor = async_client.InferInput("image", [1, 8, 8], "FP32")
            tensor.set_data_from_numpy(IMAGES[:1])
            for name, status in (("mlp", "503"), ("nope", "404")):
                with pytest.raises(InferenceServerException) as caught:
                    await client.infer(name, [tensor], timeout=1)
                assert caught.value.status() == status

    asyncio.run(main())
