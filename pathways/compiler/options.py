"""Compiler options of a program, checked here because the compiler aborts on some mistakes and ignores others."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.compiler.lengths import Lengths
from pathways.compiler.orders import ORDERS

#: The pipeline schedules that are followed. "none" is the order of the text, "auto" is searched for.
BUILT = ("none", *ORDERS, "auto")

#: Why a schedule that the field knows is refused, and what to give instead.
_NOT_BUILT = {"ZeroBubbleH2ZeroTxLatency": "it keeps up to 2 S - 1 microbatches on S stages; give 'ZeroBubbleH1'"}

#: How many iterations a scan with placed calls inside may have, to be unrolled.
UNROLL = 16

#: How many iterations of a loop that is not unrolled may be ordered and not over. The first number is for any loop. The
#: second one is for a loop of a known count whose iterations move nothing, so that more take no more memory. The third
#: one is the most that a user may set. A run's end may be seen only with that of the last run in flight (LOOK-1): with
#: more in flight, short iterations leave fewer gaps.
PARALLEL_ITERATIONS = 10
PARALLEL_ITERATIONS_IN_PLACE = 64
MOST_PARALLEL_ITERATIONS = 256

#: Options that go to the MPMD compiler as they are. All are booleans.
COMPILER_KEYS = (
    "mpmd_infer_transfers",
    "mpmd_infer_cross_mesh_reductions",
    "mpmd_fragment_remat",
    "mpmd_split_bwd_fragments",
    "mpmd_assume_homogeneous_devices",
)

#: Options of the compiler that make other calls of the call sites than a schedule has put in order.
_CHANGE_CALLS = ("mpmd_fragment_remat", "mpmd_split_bwd_fragments")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compile a program.

    `merge` lets neighbouring call sites on one slice become one computation. Without `merge`, every call site stays a
    computation of its own. `schedule` is a name in `BUILT`; it is "none" if the order is the text's. A `jax.lax.scan`
    (or `map`, or a `fori_loop` whose count is known) with placed calls inside is unrolled if it has at most `unroll`
    iterations. Of a loop that stays one, the controller has at most `parallel_iterations` ordered that are not over;
    None: one of the two numbers above, which depends on the program's loops.
    `platforms` are the platforms of the hosts, not of the client. `lengths` are those of the steps of
    pipelines that have none of their own, as the user gives them; () if the user gives none. `limits` bounds the
    microbatches in flight under "auto": by the key of a pipeline one number per stage, see `search`; () if there is no
    limit. `offload` is "auto", "none", or a number of bytes of each device: above that, a run offloads what
    it keeps for later (`pathways.plan.offloads`). For that, a loop that is not unrolled may be cut into `chunks` loops.
    """

    merge: bool = False
    schedule: str = "none"
    unroll: int = UNROLL
    parallel_iterations: int | None = None
    platforms: tuple[str, ...] = ("cpu",)
    compiler: tuple[tuple[str, bool], ...] = ()
    lengths: tuple[Lengths, ...] = ()
    limits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    offload: str | int = "auto"
    chunks: int = 1

    @classmethod
    def of(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """Checks a mapping and makes options of it.

        Raises:
            OptionError: an unknown key or schedule, a schedule that is not built, a value of the wrong type, or options
                that contradict each other.
        """
        if isinstance(options, Options):
            return options
        options = dict(options or {})
        known = (
            "merge",
            "schedule",
            "lengths",
            "unroll",
            "parallel_iterations",
            "offload",
            "platforms",
            *COMPILER_KEYS,
        )
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                raise errors.OptionError(
                    f"unknown compiler option {key!r}; "
                    f"{f'did you mean {near[0]!r}? ' if near else ''}known options: {list(known)}"
                )
        merge, schedule = options.pop("merge", False), check_schedule(options.pop("schedule", None))
        given = options.pop("lengths", None)
        lengths = () if given is None else Lengths.of(given)
        unroll = options.pop("unroll", UNROLL)
        if isinstance(unroll, bool) or not isinstance(unroll, int) or unroll < 0:
            raise errors.OptionError(
                f"compiler option 'unroll': expected the number of iterations, 0 or more, up to which a scan with "
                f"placed calls inside is unrolled, got {unroll!r}"
            )
        offload = options.pop("offload", "auto")
        if offload not in ("auto", "none") and (
            isinstance(offload, bool) or not isinstance(offload, int) or offload < 1
        ):
            raise errors.OptionError(
                f"compiler option 'offload': expected 'auto', 'none', or the number of bytes of each device that a run "
                f"may take before it offloads what it keeps for later to host memory, got {offload!r}"
            )
        is_given = "parallel_iterations" in options
        parallel = options.pop("parallel_iterations", None)
        is_count = isinstance(parallel, int) and not isinstance(parallel, bool)
        if is_given and not (is_count and 1 <= parallel <= MOST_PARALLEL_ITERATIONS):
            raise errors.OptionError(
                f"compiler option 'parallel_iterations': expected how many iterations of a loop may be in flight, 1 to "
                f"{MOST_PARALLEL_ITERATIONS}, got {parallel!r}"
            )
        platforms = options.pop("platforms", ("cpu",))
        platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
        for key, value in (("merge", merge), *options.items()):
            if not isinstance(value, bool):
                raise errors.OptionError(f"compiler option {key!r}: expected True or False, got {value!r}")
        if len(platforms) != 1 or not isinstance(platforms[0], str):
            raise errors.OptionError(
                f"compiler option 'platforms': expected the name of the one platform that all hosts "
                f"of the program have, got {platforms!r}"
            )
        made = cls(
            merge, schedule, unroll, parallel, platforms, tuple(sorted(options.items())), lengths, offload=offload
        )
        if schedule != "none":
            made.check_keeps_calls(schedule)
        return made

    def check_keeps_calls(self, schedule: str) -> None:
        """Checks that nothing here makes other computations than a schedule puts in order.

        Raises:
            OptionError: such an option.
        """
        given = {"merge": self.merge, **dict(self.compiler)}
        for key in ("merge", *_CHANGE_CALLS):
            if given.get(key, False):
                raise errors.OptionError(
                    f"compiler option {key!r} makes other computations than schedule {schedule!r} puts in order; "
                    "give one of the two"
                )

    def for_compiler(self) -> dict[str, Any]:
        """The MPMD compiler's own options. It keeps the order that it is given: the pass in `schedule` has made it."""
        return {"mpmd_infer_transfers": True, "mpmd_pipeline_schedule": "none", **dict(self.compiler)}

    @property
    def keeps_calls(self) -> bool:
        """True if every call site stays a computation of its own."""
        return not self.merge


def check_schedule(name: Any) -> str:
    """The checked name of a schedule; None is "none".

    Raises:
        OptionError: an unknown name, or one that is not built.
    """
    if name is None or name in BUILT:
        return name or "none"
    if name in _NOT_BUILT:
        raise errors.OptionError(f"schedule {name!r} is not built: {_NOT_BUILT[name]}; expected one of {list(BUILT)}")
    known = (*BUILT, *_NOT_BUILT)
    near = [each for each in known if str(name).lower() == each.lower()]
    near = near or difflib.get_close_matches(str(name), known, 1)
    raise errors.OptionError(
        f"unknown schedule {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}expected one of {list(BUILT)}"
    )
