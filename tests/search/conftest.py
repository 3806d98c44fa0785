"""Random problems small enough to enumerate, deterministic in their seed."""

import numpy as np
import pytest
from autoplan.search import Buffer, Problem


@pytest.fixture(scope="session", name="tiny_problem")
def _tiny_problem():
    return make_tiny_problem


def make_tiny_problem(seed: int) -> Problem:
    """Up to 6 nodes x 4 strategies; by seed: forbidden pairs, parallel edges, negative costs, node and edge buffers,
    limits from slack to impossible, small integer costs (many ties) or real ones."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    sizes = rng.integers(1, 5, size=n)
    low = -10 if rng.random() < 0.3 else 0
    real = rng.random() < 0.5
    scale = 10.0 ** rng.integers(-7, 4)

    def costs(*shape: int, forbidden: float) -> np.ndarray:
        out = rng.uniform(low, 10, size=shape) if real else rng.integers(low, 6, size=shape).astype(float)
        out *= scale
        out[rng.random(shape) < forbidden] = np.inf
        return out

    forbidden = rng.choice([0.0, 0.1, 0.4])
    pairs = [sorted(rng.choice(n, size=2, replace=False), key=lambda _: rng.random()) for _ in range(rng.integers(0, 10))
             ] if n > 1 else []
    edge_costs = [_edge(rng, costs, sizes[u], sizes[v], forbidden) for u, v in pairs]
    return Problem(
        tuple(costs(s, forbidden=forbidden / 2) for s in sizes), np.array(pairs).reshape(-1, 2), tuple(edge_costs),
        *_memory(rng, sizes, pairs),
    )


def _edge(rng, costs, rows: int, cols: int, forbidden: float) -> np.ndarray:
    kind = rng.integers(0, 5)
    if kind == 0:  # a metric between layouts that several strategies share
        places = costs(3, forbidden=0.0)
        return np.abs(places[rng.integers(0, 3, rows)][:, None] - places[rng.integers(0, 3, cols)])
    if kind == 1:  # separable
        return costs(rows, 1, forbidden=0.0) + costs(1, cols, forbidden=0.0)
    if kind == 2 and rng.random() < 0.3:
        return np.zeros((rows, cols))
    return costs(rows, cols, forbidden=forbidden)


def _memory(rng, sizes, pairs):
    if rng.random() < 0.3:
        return ()
    buffers = [Buffer(i, None, rng.integers(0, 20, s)) for i, s in enumerate(sizes) if rng.random() < 0.7]
    if rng.random() < 0.5:
        buffers += [Buffer(None, e, rng.integers(0, 20, (sizes[u], sizes[v])))
                    for e, (u, v) in enumerate(pairs) if rng.random() < 0.3]
    rows = int(rng.integers(0, 5))
    live = rng.integers(0, 3, (rows, len(buffers))) * (rng.random((rows, len(buffers))) < 0.7)
    most = live @ np.array([b.usage.max() for b in buffers]) if buffers else np.zeros(rows)
    limits = np.floor(most * rng.choice([0.1, 0.3, 0.5, 0.7, 1.0], size=rows)) if rows else np.zeros(0)
    return tuple(buffers), live, limits
