"""Dual ascent by sequential tree-reweighted message passing: a certified lower bound and a labelling.

Any messages m_e->u, m_e->v define an equivalent problem (a reparametrisation)

    c'_i = c_i + sum_{e at i} m_e->i,      A'_e[a, b] = A_e[a, b] - m_e->u[a] - m_e->v[b]

whose total is the same for every choice, so  offset + sum_i min c'_i + sum_e min A'_e  bounds the cost from
below. A sweep visits the nodes in order; each collects all that the edges from earlier nodes hold for it
(`_collect`: the edge's row minima become 0) and hands an equal share to each later edge. The bound never
falls. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (2006), and "A new
look at reweighted message passing" (2015) for this form.

Memory rows enter with multipliers price[r] >= 0: cost + price @ (use - limits) bounds from below what fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import Model
from .tables import Table, align
from .work import Reduction


@dataclass(frozen=True, slots=True, eq=False)
class _Arc:
    """An edge seen from one of its nodes. `core`: [R_other, C_own]; messages: u's is 2 e, v's 2 e + 1."""

    own: int
    other: int
    core: np.ndarray
    classes: np.ndarray
    order: np.ndarray | None
    starts: np.ndarray
    other_rows: np.ndarray
    neighbour: int


class Ascent:
    """The state of the ascent on one model: messages and prices. Deterministic."""

    def __init__(self, model: Model, ceiling: float = np.inf) -> None:
        """`ceiling`: cost of a known choice, used only to keep the stand-ins of infinite costs small."""
        self.model = model
        self.price = np.zeros(model.num_rows)
        self._cap = _cap(model, ceiling)
        self._aligned = [
            align([t, *(x for _, x in uses)]) for t, uses in zip(model.tables, model.edge_use, strict=True)
        ]
        n = model.num_nodes
        self.messages: list[np.ndarray] = []
        for u, v in model.edges.tolist():
            self.messages += [np.zeros(len(model.costs[u])), np.zeros(len(model.costs[v]))]
        self.bound = -np.inf
        self._load()
        before = np.array([len(a) for a in self._earlier]) if n else np.zeros(0, dtype=int)
        after = np.array([len(a) for a in self._later]) if n else np.zeros(0, dtype=int)
        self._share = 1.0 / np.maximum(1, np.maximum(before, after))

    def set_price(self, price: np.ndarray) -> None:
        """New multipliers, in cost per byte, [A]; the messages stay (any messages are valid)."""
        self.price = price
        self._load()

    def inherit(self, older: Ascent, rung: Reduction) -> None:
        """Starts from the messages of `older`, whose model `rung` reduced to this one, on edges that both
        have.

        Presolve may have changed those edges; messages are only where the ascent starts, so that does no
        harm.
        """
        number = {edge: e for e, edge in enumerate(map(tuple, older.model.edges.tolist()))}
        for e, (u, v) in enumerate(rung.kept[self.model.edges].tolist()):
            old = number.get((u, v))
            if old is not None:
                self.messages[2 * e] = older.messages[2 * old][rung.labels[u]]
                self.messages[2 * e + 1] = older.messages[2 * old + 1][rung.labels[v]]
        self.set_price(older.price[rung.rows])

    def price_of(self, rows: np.ndarray, count: int) -> np.ndarray:
        """The present prices, [count], when this model's rows are the numbers `rows` among them."""
        price = np.zeros(count)
        price[rows] = self.price
        return price

    def _load(self) -> None:
        """Costs and arcs at the present prices."""
        model, price = self.model, self.price
        self.costs = [
            c if use is None or not price.any() else c + price @ use
            for c, use in zip(model.costs, model.node_use, strict=True)
        ]
        self.constant = model.offset - float(price @ model.limits) if price.any() else model.offset
        self._earlier: list[list[_Arc]] = [[] for _ in self.costs]
        self._later: list[list[_Arc]] = [[] for _ in self.costs]
        for e, (u, v) in enumerate(model.edges.tolist()):
            table = self._table(e)
            self._later[u].append(_arc(2 * e, 2 * e + 1, table.T, v))
            self._earlier[v].append(_arc(2 * e + 1, 2 * e, table, u))

    def _table(self, e: int) -> Table:
        rows, cols, cores = self._aligned[e]
        core = cores[0]
        for (weights, _), use in zip(self.model.edge_use[e], cores[1:], strict=True):
            core = core + float(self.price @ weights) * use
        infinite = np.isposinf(core)
        if infinite.any():
            core = np.where(infinite, core.min() + self._cap, core)
        return Table(rows, cols, core)

    def sweep(self, *, forward: bool) -> np.ndarray:
        """One pass; raises `bound` and returns the labelling that it suggests, [N]."""
        messages, share, total = self.messages, self._share, self.constant
        choice = np.zeros(len(self.costs), dtype=np.int64)
        nodes = range(len(self.costs)) if forward else range(len(self.costs) - 1, -1, -1)
        arcs_in, arcs_out = (self._earlier, self._later) if forward else (self._later, self._earlier)
        for i in nodes:
            cost = self.costs[i]
            for arc in arcs_out[i]:
                cost = cost + messages[arc.own]
            guess, theta = cost, cost
            for arc in arcs_in[i]:
                message = _collect(arc, messages[arc.other])
                messages[arc.own] = message
                theta = theta + message
                guess = guess + arc.core[arc.other_rows[choice[arc.neighbour]]][arc.classes]
            choice[i] = int(guess.argmin())
            out = arcs_out[i]
            if out:
                part = theta * share[i]
                for arc in out:
                    messages[arc.own] = messages[arc.own] - part
            total += (1.0 - share[i] * len(out)) * float(theta.min())
        self.bound = total
        return choice

    def margins(self) -> list[np.ndarray]:
        """Per node [S_i]: a bound on the cost of every choice that uses the strategy (call after a sweep).

        Each node in turn collects everything from all its edges, is read, and hands equal shares back. Both
        directions, the better of the two.
        """
        best = [np.full(len(c), -np.inf) for c in self.costs]
        node_min, edge_min = self._minima()
        total = self.constant + sum(node_min) + sum(edge_min)
        order = range(len(self.costs))
        for nodes in (order, reversed(order)):
            for i in nodes:
                arcs = self._earlier[i] + self._later[i]
                theta = self.costs[i]
                for arc in arcs:
                    self.messages[arc.own] = _collect(arc, self.messages[arc.other])
                    theta = theta + self.messages[arc.own]
                    total -= edge_min[arc.own >> 1]
                least = float(theta.min())
                total += least - node_min[i]
                np.maximum(best[i], total + (theta - least), out=best[i])
                node_min[i] = 0.0 if arcs else least
                for arc in arcs:
                    self.messages[arc.own] = self.messages[arc.own] - theta / len(arcs)
                    edge_min[arc.own >> 1] = least / len(arcs)
            self.bound = max(self.bound, total)
        return best

    def _minima(self) -> tuple[list[float], list[float]]:
        node_min, edge_min = [], [0.0] * len(self.model.edges)
        for i, cost in enumerate(self.costs):
            for arc in self._earlier[i] + self._later[i]:
                cost = cost + self.messages[arc.own]
            node_min.append(float(cost.min()))
            for arc in self._later[i]:
                edge_min[arc.own >> 1] = float(
                    (_collect(arc, self.messages[arc.other]) - self.messages[arc.own]).min()
                )
        return node_min, edge_min

    def improve(self, choice: np.ndarray, sweeps: int = 20) -> np.ndarray:
        """Iterated conditional modes from `choice` at the present prices: no single change makes it cheaper.
        """
        choice = choice.copy()
        for _ in range(sweeps):
            changed = False
            for i, cost in enumerate(self.costs):
                for arcs in (self._earlier[i], self._later[i]):
                    for arc in arcs:
                        cost = cost + arc.core[arc.other_rows[choice[arc.neighbour]]][arc.classes]
                k = int(cost.argmin())
                if cost[k] < cost[choice[i]]:
                    choice[i], changed = k, True
            if not changed:
                break
        return choice


def _arc(own: int, other: int, table: Table, neighbour: int) -> _Arc:
    """`table` is [S_other, S_own]."""
    order = np.argsort(table.rows, kind="stable")
    ordered = table.rows[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    plain = len(starts) == len(order) and np.array_equal(order, np.arange(len(order)))
    return _Arc(
        own,
        other,
        np.ascontiguousarray(table.core),
        table.cols,
        None if plain else order,
        starts,
        table.rows,
        neighbour,
    )


def _collect(arc: _Arc, other: np.ndarray) -> np.ndarray:
    """min over the other end of A - m_other, [S_own]: the message after which the edge's minima for this end
    are 0.
    """
    held = other if arc.order is None else np.maximum.reduceat(other[arc.order], arc.starts)
    return (arc.core - held[:, None]).min(axis=0)[arc.classes]


def _cap(model: Model, ceiling: float) -> float:
    """Added to a table's least entry, a cost that no allowed choice can be better with."""
    least, spread = model.offset, 0.0
    for cost in model.costs:
        least += cost.min()
        spread += cost.max() - cost.min()
    for table in model.tables:
        finite = table.core[np.isfinite(table.core)]
        least += finite.min()
        spread += finite.max() - finite.min()
    known = 2.0 * (ceiling - least) if np.isfinite(ceiling) and not model.num_rows else np.inf
    return float(min(spread, known)) + 1e-6 * max(spread, abs(least), 1e-300)
