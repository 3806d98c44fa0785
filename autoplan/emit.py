"""Emission: the traced program with the plan's layouts as sharding constraints inside it.

Equations stay as they are, nested calls and remat's barriers included; constraints are added around them, in
the bodies where the values are made and read. The result computes what the original does.
"""
from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
import numpy as np

from . import compat
from .plan import Constraint, Plan, to_partition_spec
from .trace import Trace


def emit(trace: Trace, plan: Plan, mesh: jax.sharding.Mesh) -> compat.ClosedJaxpr:
    """The program of `trace` with the constraints of `plan` on `mesh`; same inputs and outputs."""
    jaxpr = compat.open_jaxpr(trace.jaxpr)
    if plan.mesh.num_devices == 1:
        return trace.jaxpr
    found = {(c.where, c.site, c.index): c for c in plan.constraints}
    if len(found) != len(plan.constraints):
        raise AssertionError("two constraints on one place")
    emitter = _Emitter(mesh, {})
    return compat.close(emitter.rewrite(jaxpr, [(c.site, c) for c in plan.constraints]),
                        compat.consts_of(trace.jaxpr))


class _Emitter:
    def __init__(self, mesh: jax.sharding.Mesh, memo: dict) -> None:
        self.mesh = mesh
        self.memo = memo

    def rewrite(self, jaxpr: compat.Jaxpr, constraints: Sequence[tuple[tuple[int, ...], Constraint]]) -> compat.Jaxpr:
        """`jaxpr` with `constraints`, whose sites are given relative to it. Equal requests give one object, so
        that a function called many times in one way is still lowered once."""
        if not constraints:
            return jaxpr
        key = (id(jaxpr), frozenset((site, c.where, c.index, c.spec, c.way, c.again) for site, c in constraints))
        if key not in self.memo:
            self.memo[key] = (jaxpr, self._rewrite(jaxpr, constraints))  # holding jaxpr keeps its id its own
        return self.memo[key][1]

    def _rewrite(self, jaxpr: compat.Jaxpr, constraints) -> compat.Jaxpr:
        here = {(site, c.where, c.index): c for site, c in constraints}
        inside: dict[tuple[int, int], list] = {}
        for site, c in constraints:
            if len(site) > 1:
                inside.setdefault((site[0], site[1]), []).append((site[2:], c))
        current: dict[compat.Var, compat.Var] = {}
        eqns: list[compat.JaxprEqn] = []
        made: dict = {}

        def constrained(var, constraint: Constraint | None, beside: compat.JaxprEqn | None = None):
            if constraint is None or isinstance(var, compat.Literal) or compat.is_dropped(var):
                return var
            for spec in (*constraint.way, constraint.spec):
                if (var, spec) not in made:
                    eqn = compat.constraint_eqn(var, NamedSharding(self.mesh, to_partition_spec(spec)), beside)
                    eqns.append(eqn)
                    made[var, spec] = eqn.outvars[0]
                var = made[var, spec]
            return var

        def now(var):
            return var if isinstance(var, compat.Literal) else current.get(var, var)

        for k, var in enumerate(jaxpr.invars):
            current[var] = constrained(var, here.get(((), "input", k)))
        for n, eqn in enumerate(jaxpr.eqns):
            operands = [now(v) for v in eqn.invars]
            for k in range(len(operands)):
                constraint = here.get(((n,), "operand", k))
                if constraint is not None and constraint.again:
                    _set_apart(operands, k, eqns)
                operands[k] = constrained(operands[k], constraint, eqn)
            if eqn.primitive.name == "dynamic_slice":
                _clamp_starts(eqn, operands, eqns)
            subs = compat.subjaxprs(eqn)
            if any((n, s) in inside for s in range(len(subs))):
                eqn = compat.with_subjaxprs(eqn, [self.rewrite(sub.jaxpr, inside.get((n, s), ()))
                                                  for s, sub in enumerate(subs)])
            eqns.append(eqn.replace(invars=operands))
            for k, var in enumerate(eqn.outvars):
                current[var] = constrained(var, here.get(((n,), "result", k)), eqn)
        outvars = [constrained(now(v), here.get(((), "output", k))) for k, v in enumerate(jaxpr.outvars)]
        return jaxpr.replace(eqns=eqns, outvars=outvars)


def _clamp_starts(eqn: compat.JaxprEqn, operands: list, eqns: list) -> None:
    """Clamps the starts of a `dynamic_slice` before it does so itself: where its result is split, XLA merges the two
    slices, and clamps to the bounds of the smaller one."""
    for k, (size, taken) in enumerate(zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"]), start=1):
        start = operands[k]
        if size != taken and not isinstance(start, compat.Literal) and size - taken <= np.iinfo(start.aval.dtype).max:
            eqns.append(compat.clamped_eqn(start, size - taken))
            operands[k] = eqns[-1].outvars[0]


def _set_apart(operands: list, k: int, eqns: list) -> None:
    """Puts operand `k` and another one of its equation behind a barrier: what is done to it from here on is not
    merged with what was done to it before, and waits until the other operand is there."""
    others = (i for i, v in enumerate(operands) if v is not operands[k] and not isinstance(v, compat.Literal))
    other = next(others, None)
    if other is None or isinstance(operands[k], compat.Literal):
        return
    barrier = compat.barrier_eqn([operands[k], operands[other]])
    eqns.append(barrier)
    operands[k], operands[other] = barrier.outvars
