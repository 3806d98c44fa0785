"""Instances of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism, read as Problems.

Format (github.com/google/iopddl): one JSON object `problem` with
    nodes.costs[i], nodes.usages[i]: a number per strategy of node i;
    nodes.intervals[i]: half-open interval of time in which the usage counts;
    edges.nodes[e]: two nodes; edges.costs[e]: their matrix, flat, the first node's strategy major;
    usage_limit: holds at every time.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from .live import maximal_rows
from .problem import Buffer, Problem

# The contest writes "not allowed" as a cost around 1e18.
FORBIDDEN = 1e17


def read(path: str | Path) -> Problem:
    """The instance in a file, JSON or gzipped JSON. Raises ValueError, with the file's name, for any other content."""
    path = Path(path)
    data = path.read_bytes()
    try:
        return problem_of_json(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data))
    except (KeyError, TypeError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not an instance of the contest: {type(error).__name__}: {error}") from error


def problem_of_json(instance: dict[str, Any]) -> Problem:
    """The Problem of a parsed instance; rows are the moments whose live sets lie in no other's."""
    said = instance["problem"]
    nodes, edges = said["nodes"], said["edges"]
    costs = tuple(_allowed(np.array(c, dtype=np.float64)) for c in nodes["costs"])
    pairs = np.array(edges["nodes"], dtype=np.int64).reshape(-1, 2)
    if len(pairs) and not (pairs.min() >= 0 and pairs.max() < len(costs)):
        raise ValueError(f"edges.nodes names nodes outside 0..{len(costs) - 1}")
    known: dict[tuple[int, bytes], np.ndarray] = {}  # one object for all equal matrices: solvers look at each once
    matrices = []
    for (u, v), flat in zip(pairs.tolist(), edges["costs"], strict=True):
        matrix = np.array(flat, dtype=np.float64)
        key = (len(costs[u]), matrix.tobytes())
        if key not in known:
            known[key] = _allowed(matrix.reshape(len(costs[u]), len(costs[v])))
        matrices.append(known[key])
    usages = [np.array(u, dtype=np.float64) for u in nodes["usages"]]
    times = np.array(nodes["intervals"], dtype=np.int64).reshape(-1, 2)
    if not len(costs) == len(usages) == len(times):
        raise ValueError(f"{len(costs)} costs, {len(usages)} usages and {len(times)} intervals of nodes")
    holders = [i for i, u in enumerate(usages) if times[i, 0] < times[i, 1] and u.any()]
    live = maximal_rows(times[holders, 0], times[holders, 1])
    return Problem(
        node_costs=costs,
        edge_nodes=pairs,
        edge_costs=tuple(matrices),
        buffers=tuple(Buffer(i, None, usages[i]) for i in holders),
        live=live,
        limits=np.full(live.rows, float(said["usage_limit"])),
    )


def _allowed(costs: np.ndarray) -> np.ndarray:
    return np.where(costs < FORBIDDEN, costs, np.inf)
