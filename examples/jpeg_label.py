"""A JPEG in, a label out: one function reads the image before the model, another names the answer after it."""

import numpy as np
import simplejpeg  # pip install simplejpeg

import paellapy as pp
from paellapy import demo


def decode(jpeg: bytes) -> np.ndarray:
    """The picture in 8 × 8 grey pixels. simplejpeg's ValueError for other bytes refuses the request."""
    grey = simplejpeg.decode_jpeg(jpeg, "GRAY")[..., 0]
    side = min(grey.shape) // 8
    if not side:
        raise ValueError(f"the picture has {grey.shape[1]} × {grey.shape[0]} pixels; it needs 8 × 8")
    return grey[: 8 * side, : 8 * side].reshape(8, side, 8, side).mean((1, 3), dtype=np.float32) / 255


def name_it(scores: np.ndarray) -> dict[str, object]:
    return {"label": f"digit {scores.argmax()}", "score": scores.max()}


def digits() -> pp.Model:
    return demo.load("cnn").changed(
        name="digits", before=decode, takes={"jpeg": bytes}, after=name_it, gives={"label": str, "score": "float32"}
    )


if __name__ == "__main__":
    image = (demo.held_out()[0][0] * 255).astype(np.uint8).repeat(40, 0).repeat(40, 1)  # 320 × 320
    file = simplejpeg.encode_jpeg(np.ascontiguousarray(image[..., None]), colorspace="GRAY")
    with pp.Engine() as engine:  # on the GPU if there is one, else on the virtual GPU
        engine.load(digits())
        print(engine.infer_sync("digits", {"jpeg": file}, deadline_ms=60_000))
