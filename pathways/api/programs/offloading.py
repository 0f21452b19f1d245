"""Lets a program that needs more memory than its devices have offload what its runs keep for later.

`pathways/plan/offloads.py` chooses what leaves the devices, and when. This module knows the devices, and compiles the
program again where its loops must be cut for that.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from pathways.api.programs.compiled import Lowering
from pathways.api.programs.registration import CompositeRegistration
from pathways.compiler.ir import Computation, LogicalProgram
from pathways.compiler.options import Options
from pathways.plan.offloads import Curves, all_at_once

#: Into how many loops a scan may be cut, so that what it saves can be offloaded piece by piece.
_CHUNKS = (4, 8, 16, 32)
#: How many calls before its use a value may be brought back. The first that fits is taken: so long has the copy.
_AHEAD = (2, 1, 0)
#: Below this part of the budget, what a program needs is not looked at closer: the temporary memory of computations
#: is seldom as much as their values.
_CLEARLY_FITS = 0.5


def within_memory(lowering: Lowering, options: Options, compile_: Callable[[Options], LogicalProgram]) -> Lowering:
    """The program as it is if it fits its devices, else with moves that make it fit; as it is if no moves do.

    `compile_` compiles it with other options. A program that calls its client back stays as it is.
    """
    topology = lowering.cluster.control().topology
    budgets = [topology.device_bytes] if topology.device_bytes else []
    if isinstance(options.offload, int):
        budgets.insert(0, options.offload)  # if it cannot keep to that, it is to run at least
    if not budgets or options.offload == "none" or lowering.program.callbacks:
        return lowering
    on_host = lowering.slices()[0].quirks.is_host_memory
    bound = lowering.bind()
    if not lowering.program.loops and max(all_at_once(bound).values(), default=0) <= _CLEARLY_FITS * budgets[0]:
        return lowering
    curves = Curves(bound, lambda _: 0, on_host)
    if max(curves.needs().values(), default=0) <= _CLEARLY_FITS * budgets[0]:
        return lowering
    temporary = _temporaries(lowering)
    curves = Curves(lowering.bind(), temporary, on_host)
    if all(need <= budgets[0] for need in curves.needs().values()):
        return lowering

    @functools.cache
    def cut(chunks: int) -> Lowering:
        if chunks == 1:
            return lowering
        return dataclasses.replace(lowering, program=compile_(dataclasses.replace(options, chunks=chunks)))

    # The user keeps the results of the run before, and has new arguments, while a run is under way. If not even moves
    # make room for that, one run alone is to fit.
    chunks = (1, *(_CHUNKS if lowering.program.loops else ()))
    for budget, keeps, count, ahead in itertools.product(budgets, (True, False), chunks, _AHEAD):
        curves = Curves(cut(count).bind(), temporary, on_host, ahead)
        if curves.lower({device: budget - keeps * curves.ends[device] for device in curves.devices}):
            return dataclasses.replace(cut(count), program=curves.program())
    return lowering  # the call says what it needs, and what there is (MEM-3)


def _temporaries(lowering: Lowering) -> Callable[[Computation], int]:
    """The temporary bytes of computations on one device: the hosts know them when they have compiled the program."""
    registration, _ = lowering.register()
    parts = registration.plans if isinstance(registration, CompositeRegistration) else [registration]
    known: dict[str, int] = {}
    for part in parts:
        for number, found in lowering.cluster.control().analyze(part.number).items():
            known[part.program.computations[number].fingerprint] = found.memory.temporary_bytes
    most = max(known.values(), default=0)
    # The loops into which a loop is cut have computations of their own, which need about as much.
    return lambda computation: 0 if computation.is_move else known.get(computation.fingerprint, most)
