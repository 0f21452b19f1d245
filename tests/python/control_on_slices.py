"""The cases of `control_cases` on slices of a cluster; and those of them that have branches."""

from __future__ import annotations

from typing import Any

from control_cases import Placed

import pathways as pw

#: The cases that have branches which only the data decides, and no loops when short ones are unrolled.
BRANCHES = (
    "cond",
    "switch",
    "cond_with_captured_values",
    "cond_in_cond",
    "cond_with_one_empty_branch",
    "scan_of_cond",
    "branches_on_different_slices",
    "branches_read_on_one_slice",
    "transfers_in_a_branch",
    "predicate_made_on_another_slice",
    "two_conds_of_one_predicate",
    "predicate_made_in_a_branch_that_is_not_taken",
    "union_of_residuals",
    "cond_of_scan",
    "cond_whose_results_are_constants",
)


def placed_on(slices: dict[str, Any]) -> Placed:
    """The functions of the cases on slices of a cluster."""
    return Placed.by(
        lambda fun, where, name: pw.jit(fun, devices=slices[where], name=name),
        lambda x, where: pw.device_put(x, slices[where]),
    )
