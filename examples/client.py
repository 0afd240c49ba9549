"""Ask a server (`paellapy serve`) which digit an image shows; only the standard library is needed."""

import json
import sys
from urllib.request import Request, urlopen

DRAWN = "....#... ...##... ..##.... .##..##. .######. ....##.. ....##.. ....#..."  # eight rows: a 4
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
image = [float(pixel == "#") for pixel in DRAWN.replace(" ", "")]
body = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": image}]}
request = Request(f"{url}/v2/models/mlp/infer", json.dumps(body).encode(), {"Content-Type": "application/json"})
with urlopen(request, timeout=60) as answer:
    scores = json.load(answer)["outputs"][0]["data"]
print("digit", max(range(10), key=scores.__getitem__))
