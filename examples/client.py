"""Ask a server (`paellapy serve`) for the class of an image; the standard library is enough."""

import json
import sys
from urllib.request import Request, urlopen

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
image = [0.0] * 64
body = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": image}]}
request = Request(f"{url}/v2/models/mlp/infer", json.dumps(body).encode(), {"Content-Type": "application/json"})
with urlopen(request, timeout=60) as answer:
    scores = json.load(answer)["outputs"][0]["data"]
print("class", max(range(10), key=scores.__getitem__))
