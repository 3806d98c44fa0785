"""Local search: change one node at a time while that helps, memory rows held or brought back within their
limits.
"""

from __future__ import annotations

import numpy as np

from .model import Model, use_of
from .tables import Table

MAX_SWEEPS = 30
# The penalty per byte over the limit doubles at most so often before a choice that does not fit is given up.
MAX_DOUBLINGS = 40


class Descent:
    """Iterated conditional modes on one model (Besag 1986), with a penalty on bytes above the limits."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._around: list[list[tuple[int, Table]]] = [[] for _ in model.costs]
        self._uses: list[list[tuple[int, np.ndarray, Table]]] = [[] for _ in model.costs]
        for (u, v), table, uses in zip(model.edges.tolist(), model.tables, model.edge_use, strict=True):
            self._around[u].append((v, table.T))
            self._around[v].append((u, table))
            for weights, use in uses:
                self._uses[u].append((v, weights, use.T))
                self._uses[v].append((u, weights, use))
        self._room = model.limits + 0.25 * model.tolerance

    def improve(self, choice: np.ndarray) -> np.ndarray:
        """A choice that no change of one node makes cheaper; within the limits if the way there was found."""
        choice = choice.copy()
        use = use_of(self.model, choice)
        if self._over(use) > 0:
            choice, use = self._repair(choice, use)
        if self._over(use) > 0:
            return choice
        for _ in range(MAX_SWEEPS):
            if not self._sweep(choice, use, np.inf):
                break
        return choice

    def _over(self, use: np.ndarray) -> float:
        return float(np.maximum(use - self._room, 0.0).sum())

    def _repair(self, choice: np.ndarray, use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spread = sum(float(np.ptp(c)) for c in self.model.costs) + 1e-300
        penalty = 1e-3 * spread / self._over(use)
        for _ in range(MAX_DOUBLINGS):
            changed = self._sweep(choice, use, penalty)
            if self._over(use) <= 0:
                break
            penalty *= 2.0 if changed else 8.0
        return choice, use

    def _sweep(self, choice: np.ndarray, use: np.ndarray, penalty: float) -> bool:
        """One pass over the nodes; changes choice and use ([A] bytes) in place. True if anything changed."""
        changed = False
        for i, cost in enumerate(self.model.costs):
            for j, table in self._around[i]:
                cost = cost + table.core[table.rows[choice[j]]][table.cols]
            if self.model.node_use[i] is not None or self._uses[i]:
                own = self._own_use(i, choice)
                over = np.maximum((use - own[:, choice[i]] - self._room)[:, None] + own, 0.0).sum(axis=0)
                cost = np.where(over > 0, np.inf, cost) if penalty == np.inf else cost + penalty * over
            k = int(cost.argmin())
            if cost[k] < cost[choice[i]]:
                if self.model.node_use[i] is not None or self._uses[i]:
                    use += own[:, k] - own[:, choice[i]]
                choice[i], changed = k, True
        return changed

    def _own_use(self, i: int, choice: np.ndarray) -> np.ndarray:
        """Bytes that hang on node i by its strategy, the neighbours as chosen, [A, S_i]."""
        own = self.model.node_use[i]
        if own is None:
            own = np.zeros((self.model.num_rows, len(self.model.costs[i])))
        for j, weights, table in self._uses[i]:
            own = own + weights[:, None] * table.core[table.rows[choice[j]]][table.cols]
        return own
