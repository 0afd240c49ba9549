"""The part of the GPU that a program keeps busy, computed from the time of several runs at once.

If n programs independently want the GPU for a fraction u of their time, they keep it busy for 1 - (1 - u)^n of the
time. Each then takes u / (1 - (1 - u)^n) of the GPU's time. This measured quantity is the program's *demand*; it falls
with n. To be comparable, demands are given for TOGETHER runs at once.
"""

from __future__ import annotations

TOGETHER = 8  # runs at once for measuring a demand, if there are as many lanes
MOST_BUSY = 0.995  # at 1 no other program would ever run


def busy_alone(demand: float, together: int) -> float:
    """The fraction of its time for which a program wants the GPU, if `together` runs at once have this demand each.

    A demand near 1 / together only means that hardly any run waited. Then half of it is returned, since runs whose
    waiting is too short to measure still have a cost.

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
    """Converts a demand measured with `together` runs at once to TOGETHER runs.

    The result never exceeds the demand measured with fewer runs, even for programs so short that hardly any run waited.

    >>> [round(usual_demand(*each), 3) for each in ((0.25, 8), (0.29, 5), (1.0, 2), (0.08, 5))]
    [0.25, 0.231, 0.995, 0.08]
    """
    if together == TOGETHER:
        return demand
    busy = busy_alone(demand, together)
    usual = float(busy / (1 - (1 - busy) ** TOGETHER))
    return min(usual, demand) if together < TOGETHER else usual
