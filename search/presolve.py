"""Exact reductions. Each step leaves at least one optimum alive; `presolve` runs them to a fixed point.

Every step takes the Work and the nodes to look at, changes it, and marks what may profit from another look.
Ties go to the lowest strategy index, so the outcome is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .model import Model, zero_table
from .tables import Table, add, min_plus, tidy
from .work import Infeasible, Reduction, Work, frozen, work_of

# Numbers touched before presolve stops; about 1e9 numpy operations a second.
EFFORT_LIMIT = 3e9
# A node of degree 2 goes when the table that replaces its two is at most this much larger than both together.
GROWTH_LIMIT = 2.0
SMALL_TABLE = 1024
# A table whose entries are a_i + b_j up to this share of its largest entry counts as separable.
SEPARABLE_TOLERANCE = 1e-13


def forbid(work: Work, nodes: list[int]) -> None:
    """Drops strategies that cannot be part of any allowed choice: infinite cost, dead ends, too much memory.
    """
    for i in nodes:
        alive = np.isfinite(work.costs[i])
        for table in work.tables[i].values():
            dead = np.isposinf(table.core).all(axis=1)
            if dead.any():
                alive &= ~dead[table.rows]
        if work.node_use[i] is not None:
            alive &= (work.node_use[i] <= (work.limits + work.tolerance)[:, None]).all(axis=0)
        work.keep(i, np.flatnonzero(alive))


def constant_memory(work: Work, nodes: list[int]) -> None:
    """Takes memory that every strategy of a node (or pair of an edge) needs out of the limits."""
    before = work.limits
    for i in nodes:
        for j, uses in list(work.uses[i].items()):
            _constant_edge_memory(work, i, j, uses)
        use = work.node_use[i]
        if use is None:
            continue
        least = use.min(axis=1)
        if least.any():
            work.lower_limits(least)
            use = use - least[:, None]
        work.node_use[i] = use if use.any() else None
    if work.limits is not before:
        work.wake_memory()


def _constant_edge_memory(work: Work, i: int, j: int, uses: tuple) -> None:
    """An edge's memory that depends on one end only becomes that node's."""
    left = []
    for weights, table in uses:
        if table.core.shape[0] == 1:
            work.add_use(j, weights[:, None] * table.core[0][table.cols])
        elif table.core.shape[1] == 1:
            work.add_use(i, weights[:, None] * table.core[:, 0][table.rows])
        else:
            left.append((weights, table))
    if len(left) == len(uses):
        return
    work.dirty.update((i, j))
    if left:
        work.uses[i][j], work.uses[j][i] = tuple(left), tuple((w, t.T) for w, t in left)
    else:
        del work.uses[i][j], work.uses[j][i]


def separate(work: Work, nodes: list[int]) -> None:
    """Moves what a table owes to one end alone into that node's costs; a table with nothing left goes."""
    for i in nodes:
        for j, table in list(work.tables[i].items()):
            core = table.core
            a = core.min(axis=1)
            core = core - a[:, None]
            b = core.min(axis=0)
            if not (a.any() or b.any()):
                if not core.any() and j not in work.uses[i]:
                    work.drop_edge(i, j)
                continue
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                continue  # a dead end: forbid's business
            core = core - b
            scale = np.abs(table.core[np.isfinite(table.core)]).max()
            core[core <= SEPARABLE_TOLERANCE * scale] = 0.0
            work.costs[i] = work.costs[i] + a[table.rows]
            work.costs[j] = work.costs[j] + b[table.cols]
            work.touch(i)
            if core.any():
                work.set_table(i, j, tidy(table.rows, table.cols, core))
            elif j in work.uses[i]:
                work.set_table(i, j, zero_table(*table.shape))
            else:
                work.drop_edge(i, j)


def dominate(work: Work, nodes: list[int]) -> None:
    """Drops strategy j when some i costs and needs no more than j whatever the neighbours choose:

    c_i + sum_e max_b (A_e[i, b] - A_e[j, b]) <= c_j,   and memory of i <= memory of j in every row and edge.
    """
    for i in nodes:
        if len(work.labels[i]) == 1:
            continue
        first, second = _candidates(work, i)
        if not len(first):
            continue
        worst = work.costs[i][first] - work.costs[i][second]
        for table in work.tables[i].values():
            worst += _worst_difference(table, first, second)
            work.effort += len(first) * table.core.shape[1]
        stands = worst <= 0
        for uses in work.uses[i].values():
            for _, table in uses:
                stands &= _worst_difference(table, first, second) <= 0
        better = np.eye(len(work.labels[i]), dtype=bool)
        better[first[stands], second[stands]] = True
        work.keep(i, _undominated(better))


def _candidates(work: Work, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of different strategies of which the first may dominate the second.

    They pass the memory test and the cost test at one neighbour's strategy per edge: where the second is
    cheapest, which is mostly where it is most ahead of the first.
    """
    lead = work.costs[i][:, None] - work.costs[i]
    for table in work.tables[i].values():
        cheapest = table.core.argmin(axis=1)
        ahead = table.core[:, cheapest] - table.core[np.arange(len(cheapest)), cheapest]
        lead += ahead[table.rows[:, None], table.rows]
    work.effort += lead.size * (1 + work.degree(i))
    possible = lead <= 0
    if work.node_use[i] is not None:
        for use in np.unique(work.node_use[i], axis=0):
            possible &= use[:, None] <= use
    np.fill_diagonal(possible, False)
    return np.nonzero(possible)


def _worst_difference(table: Table, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """max_b (A[first, b] - A[second, b]) per pair; where both are infinite, b is out of reach and does not
    count.
    """
    count = len(table.core)
    pairs, place = np.unique(table.rows[first] * count + table.rows[second], return_inverse=True)
    out = np.empty(len(pairs))
    step = max(1, (1 << 18) // table.core.shape[1])
    infinite = np.isposinf(table.core).any()
    for start in range(0, len(pairs), step):
        row, other = np.divmod(pairs[start : start + step], count)
        difference = table.core[row] - table.core[other]
        if infinite:
            difference[np.isnan(difference)] = -np.inf
        out[start : start + step] = difference.max(axis=1)
    return out[place]


def _undominated(better: np.ndarray) -> np.ndarray:
    """Positions that stay, given better[i, j]: i may stand for j. Of equals the first stays."""
    order = np.arange(len(better))
    strictly = better & ~(better.T & (order[:, None] >= order))
    kept = ~strictly.any(axis=0)
    if better[kept][:, ~kept].any(axis=0).all():  # every one that goes has a stand-in that stays
        return np.flatnonzero(kept)
    kept[:] = True  # rounding made a cycle: one by one
    for j in order:
        others = kept.copy()
        others[j] = False
        kept[j] = not better[others, j].any()
    return np.flatnonzero(kept)


def fix_single(work: Work, nodes: list[int]) -> None:
    """A node with one strategy left becomes a cost (and memory) of its neighbours."""
    for i in nodes:
        if len(work.labels[i]) > 1:
            continue
        for j in list(work.tables[i]):
            work.costs[j] = work.costs[j] + work.tables[i][j].row(0)
            for weights, table in work.uses[i].get(j, ()):
                work.add_use(j, weights[:, None] * table.row(0))
        if work.node_use[i] is not None:
            work.lower_limits(work.node_use[i][:, 0])
        work.pay(float(work.costs[i][0]))
        work.remove(i, ())


def eliminate(work: Work, nodes: list[int]) -> None:
    """Minimises over nodes of degree 0, 1 and 2 that carry no memory: their neighbours get the minimum as a
    cost.
    """
    queue = sorted(nodes, key=lambda i: (work.degree(i), i), reverse=True)
    while queue:
        i = queue.pop()
        if not work.alive[i] or work.degree(i) > 2 or work.carries_memory(i):
            continue
        around = sorted(work.tables[i])
        neighbours = tuple((j, work.labels[j], work.tables[j][i]) for j in around)
        if len(around) == 0:
            work.pay(float(work.costs[i].min()))
            work.remove(i, ())
        elif len(around) == 1:
            j, _, table = neighbours[0]
            work.effort += table.core.shape[0] * len(work.labels[i])
            work.costs[j] = (
                work.costs[j] + (table.core[:, table.cols] + work.costs[i]).min(axis=1)[table.rows]
            )
            work.remove(i, neighbours)
        else:
            table = _bridge(work, i, neighbours[0][2], neighbours[1][2].T, *around)
            if table is None:
                continue
            work.remove(i, neighbours)
            work.add_table(around[0], around[1], table)
        queue.extend(around)


def _bridge(work: Work, i: int, left: Table, right: Table, u: int, v: int) -> Table | None:
    """The table between the two neighbours that stands for node i, or None when it would be too large."""
    size = left.core.shape[0] * right.core.shape[1]
    if size > max(GROWTH_LIMIT * (left.core.size + right.core.size), SMALL_TABLE):
        return None
    work.effort += size * len(work.labels[i])
    core = min_plus(left.core[:, left.cols], work.costs[i], right.core[right.rows])
    table = tidy(left.rows, right.cols, core)
    if v in work.tables[u]:
        merged = add(work.tables[u][v], table)
        before = work.tables[u][v].core.size + left.core.size + right.core.size
        if merged.core.size > max(GROWTH_LIMIT * before, SMALL_TABLE):
            return None
    return table


def drop_slack_rows(work: Work, nodes: list[int]) -> None:
    """Drops memory rows that no choice left can exceed; what carried memory only there is free of it."""
    del nodes
    most = np.zeros(len(work.limits))
    for use in work.node_use:
        if use is not None:
            most += use.max(axis=1)
    for i, uses in enumerate(work.uses):
        for j, parts in uses.items():
            most += sum((w * t.core.max() for w, t in parts if i < j), np.zeros(len(most)))
    tight = most > work.limits
    if not tight.all():
        work.keep_rows(tight)


Step = Callable[[Work, list[int]], None]
STEPS: tuple[Step, ...] = (
    forbid,
    constant_memory,
    fix_single,
    separate,
    eliminate,
    dominate,
    drop_slack_rows,
)


def presolve(
    model: Model,
    steps: tuple[Step, ...] = STEPS,
    *,
    kept: list[np.ndarray] | None = None,
    settled: bool = False,
    effort_limit: float = EFFORT_LIMIT,
) -> Reduction:
    """Runs `steps` until none finds more, or `effort_limit` numbers have been touched.

    `kept`: per node the strategies (positions, ascending) to start from, when some are known to be of no use.
    `settled`: the model is itself the outcome of `steps`, so only what `kept` changes needs another look.

    The first step with work waiting runs next, so cheap ones go first; `forbid` always is among them, since
    the others reckon on strategies that are not dead ends (they stay exact, but find less, where one is).
    """
    work = work_of(model)
    steps = steps if forbid in steps else (forbid, *steps)
    try:
        for i, positions in enumerate(kept or ()):
            work.keep(i, positions)
        waiting = {step: set(work.dirty if settled else range(model.num_nodes)) for step in steps}
        while work.effort < effort_limit and (step := next((s for s in steps if waiting[s]), None)):
            nodes = sorted(i for i in waiting[step] if work.alive[i])
            waiting[step], work.dirty = set(), set()
            with np.errstate(invalid="ignore"):  # inf - inf among dead ends
                step(work, nodes)
            for others in waiting.values():
                others |= work.dirty
    except Infeasible as reason:
        return frozen(work, str(reason))
    return frozen(work, None)
