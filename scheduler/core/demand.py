"""What part of the GPU a program keeps busy, from how long several at once take.

Programs that want the GPU independently of each other, parts u of their time, keep it busy 1 - (1 - u)^n of the time, n
of them: each then takes u / (1 - (1 - u)^n) of the GPU's time. That is what is measured, its *demand*, and it is the
less the more there are. To be compared, demands are those of TOGETHER at once.
"""

from __future__ import annotations

TOGETHER = 8  # runs at once to measure a demand, where there are as many lanes
MOST_BUSY = 0.995  # at 1 nothing else would ever run


def busy_alone(demand: float, together: int) -> float:
    """The part of its time that a program wants the GPU, if `together` of them at once take `demand` of its time each.

    A demand near 1 / together says only that hardly anybody waited. Then half of it is taken: so many that nobody could
    have seen them wait are not free of cost.

    >>> [round(busy_alone(*each), 3) for each in ((0.25, 8), (0.12, 8), (0.9, 1), (1.0, 8))]
    [0.213, 0.06, 0.9, 0.995]
    """
    if together <= 1:
        return min(demand, MOST_BUSY)
    low, high = demand / 2, MOST_BUSY
    for _ in range(50):
        busy = (low + high) / 2
        if busy / (1 - (1 - busy) ** together) < demand:
            low = busy
        else:
            high = busy
    return high


def usual_demand(demand: float, together: int) -> float:
    """What a demand that so many were seen to have would be for TOGETHER at once.

    Never more than fewer were seen to have: nor of programs so short that even those hardly waited.

    >>> [round(usual_demand(*each), 3) for each in ((0.25, 8), (0.29, 5), (1.0, 2), (0.08, 5))]
    [0.25, 0.231, 0.995, 0.08]
    """
    if together == TOGETHER:
        return demand
    busy = busy_alone(demand, together)
    usual = float(busy / (1 - (1 - busy) ** TOGETHER))
    return min(usual, demand) if together < TOGETHER else usual
