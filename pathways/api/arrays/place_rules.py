"""Rules that say by the path of a leaf how it is cut: regular expressions and `PartitionSpec`s, in order. Pure.

For `pw.place` and `Pipeline.place`. The first rule whose expression is found in the path counts.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from pathways import errors
from pathways.api.arrays.tree_paths import Leaf

#: How many paths or rules a message names.
_SHOWN = 8


def are_rules(specs: Any) -> bool:
    """Whether `specs` are rules, and not a pytree prefix of specs: a list or tuple that begins with a pair of an
    expression and something."""
    if not isinstance(specs, list | tuple) or not specs:
        return False
    first = specs[0]
    return isinstance(first, list | tuple) and len(first) == 2 and isinstance(first[0], str | re.Pattern)


class Rules:
    """Checked rules, which count what they match."""

    def __init__(self, rules: Sequence[Any], what: str) -> None:
        """Raises:
        ShardingError: a rule is no pair of a regular expression and a PartitionSpec; names it.
        """
        self._what = what
        self._rules = [_checked(rule, number, what) for number, rule in enumerate(rules)]
        self._taken = [0] * len(self._rules)  # leaves that the rule decides
        self._found = [0] * len(self._rules)  # leaves that it would decide, if it came first
        self._missed: list[Leaf] = []
        self._paths: list[str] = []

    def spec_of(self, leaf: Leaf) -> PartitionSpec | None:
        """The spec of a leaf; None: replicated. A leaf with one element is replicated if no rule says more."""
        self._paths.append(leaf.path)
        hits = [number for number, (pattern, _) in enumerate(self._rules) if pattern.search(leaf.path)]
        for number in hits:
            self._found[number] += 1
        if hits:
            self._taken[hits[0]] += 1
            return self._rules[hits[0]][1]
        if np.prod(leaf.shape, dtype=int) != 1:
            self._missed.append(leaf)
        return None

    def name_of(self, leaf: Leaf) -> str:
        """The rule that decides a leaf, for messages."""
        found = next((pattern for pattern, _ in self._rules if pattern.search(leaf.path)), None)
        return "" if found is None else f" (rule {found.pattern!r})"

    def finish(self, depth: int) -> None:
        """When all leaves have been asked for. Warns of each rule that has decided nothing.

        `depth`: `stacklevel` of the warning.

        Raises:
            ShardingError: leaves that no rule matches.
        """
        if self._missed:
            first, more = self._missed[0], self._missed[1:]
            others = f"; so do {_some([leaf.path for leaf in more])}" if more else ""
            raise errors.ShardingError(
                f"leaf {first.path!r} of {self._what}, of shape {first.shape}, matches none of its rules: "
                f"{_some([f'{pattern.pattern} -> {spec}' for pattern, spec in self._rules])}{others}. Add a rule; "
                "('.*', PartitionSpec()) as the last one replicates what is left"
            )
        for (pattern, _), taken, found in zip(self._rules, self._taken, self._found, strict=True):
            if taken:
                continue
            if found:
                why = "matches only leaves that rules before it decide; put it before them"
            else:
                near = difflib.get_close_matches(pattern.pattern, self._paths, 3, 0.3) or self._paths
                why = f"matches no leaf; paths are such as {_some(near, 3)}"
            warnings.warn(f"rule {pattern.pattern!r} of {self._what} {why}", UserWarning, stacklevel=depth)


def _checked(rule: Any, number: int, what: str) -> tuple[re.Pattern[str], PartitionSpec | None]:
    pair = tuple(rule) if isinstance(rule, list | tuple) else ()
    if len(pair) != 2 or not isinstance(pair[0], str | re.Pattern) or not isinstance(pair[1], PartitionSpec | None):
        raise errors.ShardingError(
            f"rule {number} of {what}: expected a pair of a regular expression and a PartitionSpec (or None: "
            f"replicated), got {rule!r}"
        )
    try:
        return re.compile(pair[0]), pair[1]
    except re.error as error:
        raise errors.ShardingError(
            f"rule {number} of {what}: {pair[0]!r} is no regular expression: {error}; put a backslash before a "
            "character that stands for itself"
        ) from None


def _some(words: Sequence[str], count: int = _SHOWN) -> str:
    more = f" and {len(words) - count} more" if len(words) > count else ""
    return ", ".join(repr(word) for word in words[:count]) + more
