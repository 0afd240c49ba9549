"""What the host says about each row of a batch, as the kernels of a step read it."""

from __future__ import annotations

import numpy as np
import triton.language as tl

ROW = np.dtype(
    [
        ("sequence", np.int32),  # its number; -1: the row is not used
        ("position", np.int32),  # of the token that enters the model; the next one is chosen
        ("token", np.int32),  # of a chunk: the token after which the next one is chosen
        ("place", np.int32),  # where a page joins the sequence; -1: none does
        ("page", np.int32),
        ("seed", np.uint32),
        ("temperature", np.float32),  # 0: the most probable token
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),  # 0: all
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)


def _word(name: str) -> tl.constexpr:
    return tl.constexpr(ROW.fields[name][1] // 4)  # type: ignore[index]


WORDS = tl.constexpr(ROW.itemsize // 4)
SEQUENCE, POSITION, TOKEN, PLACE, PAGE_NUMBER = map(_word, ("sequence", "position", "token", "place", "page"))
SEED, PARAMETERS = _word("seed"), _word("temperature")
