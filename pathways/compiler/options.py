"""Compiler options of a program, checked here because the compiler aborts on some mistakes and ignores others."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pathways import errors

#: The pipeline schedules that jaxlib's MPMD compiler knows.
SCHEDULES = ("none", "1F1B", "GPipe", "Circular", "ZeroBubbleH1", "ZeroBubbleH2ZeroTxLatency")

#: Options that go to the MPMD compiler as they are. All are booleans.
COMPILER_KEYS = (
    "mpmd_infer_transfers",
    "mpmd_infer_cross_mesh_reductions",
    "mpmd_fragment_remat",
    "mpmd_split_bwd_fragments",
    "mpmd_assume_homogeneous_devices",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compile a program.

    `merge` lets neighbouring call sites on one slice become one computation. Without `merge` and without a `schedule`,
    every call site stays a computation of its own. `platforms` are the platforms of the hosts, not of the client.
    """

    merge: bool = False
    schedule: str | None = None
    platforms: tuple[str, ...] = ("cpu",)
    compiler: tuple[tuple[str, bool], ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """Checks a mapping and makes options of it.

        Raises:
            OptionError: an unknown key or schedule, or a value of the wrong type.
        """
        if isinstance(options, Options):
            return options
        options = dict(options or {})
        known = ("merge", "schedule", "platforms", *COMPILER_KEYS)
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                raise errors.OptionError(
                    f"unknown compiler option {key!r}; "
                    f"{f'did you mean {near[0]!r}? ' if near else ''}known options: {list(known)}"
                )
        merge, schedule = options.pop("merge", False), options.pop("schedule", None)
        platforms = options.pop("platforms", ("cpu",))
        platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
        for key, value in (("merge", merge), *options.items()):
            if not isinstance(value, bool):
                raise errors.OptionError(f"compiler option {key!r}: expected True or False, got {value!r}")
        if schedule is not None and schedule not in SCHEDULES:
            raise errors.OptionError(f"unknown schedule {schedule!r}; expected one of {list(SCHEDULES)}")
        if len(platforms) != 1 or not isinstance(platforms[0], str):
            raise errors.OptionError(
                f"compiler option 'platforms': expected the name of the one platform that all hosts "
                f"of the program have, got {platforms!r}"
            )
        return cls(merge, schedule, platforms, tuple(sorted(options.items())))

    def for_compiler(self) -> dict[str, Any]:
        """The MPMD compiler's own options."""
        return {"mpmd_infer_transfers": True, "mpmd_pipeline_schedule": self.schedule or "none", **dict(self.compiler)}

    @property
    def keeps_calls(self) -> bool:
        """True if every call site stays a computation of its own."""
        return not self.merge and self.schedule is None
