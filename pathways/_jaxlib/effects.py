"""The effects of equations (EFF-1): which of JAX's effects we run, and which equation has one that we do not.

An effect is what JAX notes about an equation that does more than give results, so that nobody drops it as dead code. It
stands at an equation and, because JAX passes it on, at every equation around that one. What JAX keeps inside (the
references of a Pallas kernel) does not. The effects of references are gone before: `references` makes values of them.

Pure.
"""

from __future__ import annotations

import itertools
from typing import Any

from jax._src import callback, core, debugging, effects, ffi, source_info_util
from jax._src.lax import lax

from pathways._jaxlib.jaxprs import opened, sub_jaxprs

#: Of callbacks whose order JAX promises; and of all callbacks.
ORDERED_EFFECTS = (callback.OrderedIOEffect, debugging.OrderedDebugEffect)
CALLBACK_EFFECTS = (callback.IOEffect, debugging.DebugEffect, *ORDERED_EFFECTS)
#: XLA itself runs these: it keeps the operation, if we keep the computation that has it inside.
KEPT_EFFECTS = (ffi.FfiEffect, lax.NoDCEEffect)
#: All that is run.
_RUN = (*CALLBACK_EFFECTS, *KEPT_EFFECTS)
#: No cause to refuse an equation: all that is run; and the names of a mesh's axes, where there is nothing to run.
_KNOWN = (*_RUN, core.NamedAxisEffect)


def has_effects(eqn: Any) -> bool:
    """Whether something must be run even if nobody reads the results. A `pure_callback` has no effect."""
    return any(isinstance(effect, _RUN) for effect in eqn.effects)


def unknown_effect(jaxpr: Any) -> tuple[Any, Any] | None:
    """An effect that we do not run, and the innermost equation that has it; None: there is none. What is not known here
    is not run, whether JAX could run it or not."""
    for eqn in opened(jaxpr)[0].eqns:
        for effect in eqn.effects:
            if not isinstance(effect, _KNOWN):
                found = next((each for each in _sources(eqn, type(effect)) if not _does_nothing(each)), None)
                if found is not None:
                    return effect, found
    return None


def _sources(eqn: Any, kind: type[effects.Effect]) -> list[Any]:
    """The innermost equations with an effect of this kind in an equation; the equation itself if none inside has it."""
    inner = itertools.chain.from_iterable(sub.eqns for sub in sub_jaxprs(eqn.params))
    found = [_sources(each, kind) for each in inner if any(isinstance(effect, kind) for effect in each.effects)]
    return [*itertools.chain.from_iterable(found)] or [eqn]


def _does_nothing(eqn: Any) -> bool:
    """Whether JAX itself does nothing here: `checkify.debug_check` outside of `checkify.checkify`."""
    return eqn.primitive.name == "check" and bool(eqn.params.get("debug"))


def effect_name(effect: Any) -> str:
    """What JAX calls an effect: its class, with the error of a check."""
    error = getattr(effect, "error_type", None)
    return type(effect).__name__ + (f"({error.__name__})" if isinstance(error, type) else "")


def source_of(eqn: Any) -> str:
    """Where the user's Python made an equation, in parentheses; "" if it is not known."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f" ({frame.file_name}:{frame.start_line})"
