"""Random problems small enough to enumerate, deterministic in their seed."""

import numpy as np
import pytest

from autoplan.search import Buffer, Problem, brute_force

COUNT = 400


@pytest.fixture(scope="session")
def tiny_problems():
    """(problem, its solution by brute force), COUNT times."""
    problems = [tiny_problem(seed) for seed in range(COUNT)]
    return [(problem, brute_force(problem)) for problem in problems]


def tiny_problem(seed: int) -> Problem:
    """Up to 6 nodes x 4 strategies. By seed: forbidden pairs, parallel edges, negative costs, node and edge
    buffers, limits from slack to impossible, small integer costs (many ties) or real ones."""
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
    pairs = []
    for _ in range(rng.integers(0, 10) if n > 1 else 0):
        pairs.append(rng.permutation(rng.choice(n, size=2, replace=False)))
    return Problem(
        tuple(costs(s, forbidden=forbidden / 2) for s in sizes),
        np.array(pairs).reshape(-1, 2),
        tuple(_edge(rng, costs, sizes[u], sizes[v], forbidden) for u, v in pairs),
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
        buffers += [
            Buffer(None, e, rng.integers(0, 20, (sizes[u], sizes[v])))
            for e, (u, v) in enumerate(pairs)
            if rng.random() < 0.3
        ]
    rows = int(rng.integers(0, 5))
    live = rng.integers(0, 3, (rows, len(buffers))) * (rng.random((rows, len(buffers))) < 0.7)
    most = live @ np.array([b.usage.max() for b in buffers]) if buffers else np.zeros(rows)
    limits = np.floor(most * rng.choice([0.1, 0.3, 0.5, 0.7, 1.0], size=rows)) if rows else np.zeros(0)
    return tuple(buffers), live, limits


@pytest.fixture(scope="session")
def layered_problem():
    """make(layers, seed=, tightness=) -> a problem like the planner's: a chain with skips, layouts over two
    axes, costs in seconds, resharding on the edges, memory rows with a limit at `tightness` of the range."""
    return _layered


def _layered(layers: int, *, seed: int = 0, tightness: float | None = None) -> Problem:
    rng = np.random.default_rng(seed)
    layouts = np.array([(a, b) for a in range(4) for b in range(4)])  # per axis: 0 none, 1..3 a dim
    size = np.array([4, 8])
    split = np.prod(np.where(layouts > 0, size, 1), axis=1)
    costs = [rng.exponential(1e-3) / split + 1e-6 * rng.random(len(split)) for _ in range(layers)]
    for cost in costs[::2]:  # what is split here must be gathered, at more than the split saves
        cost += 2e-3 * rng.random() * (1 - 1 / split)
    pairs = [(i - 1, i) for i in range(1, layers)]
    pairs += [(i, i + 3) for i in range(layers - 3)] + [(i, i + 8) for i in range(0, layers - 8, 3)]
    differs = layouts[:, None] != layouts[None]
    edges = [(differs * [2e-4, 1e-4]).sum(-1) * rng.exponential(1.0) for _ in pairs]
    memory = ()
    if tightness is not None:
        usage = [np.round(rng.exponential(1e9) / split) for _ in range(layers)]
        rows = np.arange(0, layers, 4)[:, None]
        index = np.arange(layers)
        live = ((rows <= index) & (index <= rows + 5) | (index % 4 == 0)).astype(float)
        least, most = live @ [u.min() for u in usage], live @ [u.max() for u in usage]
        limits = np.full(len(live), (least + tightness * (most - least)).min())
        limits = np.maximum(limits, least + 0.02 * (most - least))
        memory = (tuple(Buffer(i, None, u) for i, u in enumerate(usage)), live, limits)
    return Problem(tuple(costs), np.array(pairs), tuple(edges), *memory)


@pytest.fixture(scope="session")
def more_tiny_problems():
    """(seed, problem), of other seeds than tiny_problems: three times as many."""
    return [(seed, tiny_problem(seed)) for seed in range(COUNT, 4 * COUNT)]
