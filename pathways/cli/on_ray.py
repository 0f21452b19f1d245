"""The options of `pathways up --on ray`, and what it starts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pathways import errors

if TYPE_CHECKING:
    from pathways.cluster.launcher import Listening
    from pathways.cluster.ray_cluster import RayClusterHandle

#: As `pathways.cluster.ray_resources` has them, which the command line does not load for other commands.
STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_NAMES = (
    "ray_address",
    "resource",
    "strategy",
    "label",
    "wait_for_resources",
    "start_timeout",
    "nodes_per_island",
    "fabric",
    "trusted_fabric",
)


def ray_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which gets their values by the names in `_NAMES`."""
    for option in reversed(
        [
            click.option("--ray-address", metavar="ADDRESS", default=None, help="The Ray cluster.  [default: auto]"),
            click.option(
                "--resource", metavar="NAME=AMOUNT", multiple=True, help="What Ray sets aside for each host, as GPU=8."
            ),
            click.option(
                "--strategy",
                type=click.Choice(STRATEGIES),
                default=None,
                help="How Ray places the islands on its nodes.  [default: SPREAD]",
            ),
            click.option(
                "--nodes-per-island",
                type=click.IntRange(1),
                default=None,
                help="Nodes over which the hosts of an island are spread.  [default: 1]",
            ),
            click.option(
                "--fabric", metavar="WHERE", default=None, help="The network of an island on several nodes: see agent."
            ),
            click.option(
                "--trusted-fabric", is_flag=True, help="The fabric is private, although its address is a public one."
            ),
            click.option("--label", metavar="NAME=VALUE", multiple=True, help="A label of the Ray nodes to use."),
            click.option(
                "--wait-for-resources", is_flag=True, help="The Ray cluster grows by itself: wait until it has."
            ),
            click.option(
                "--start-timeout", type=click.FloatRange(0, min_open=True), default=None, help="Seconds, of the start."
            ),
        ]
    ):
        command = option(command)
    return command


def start_on_ray(asked: dict[str, Any], where: Listening | None, **shape: Any) -> RayClusterHandle:
    """Starts the cluster. `asked`: the values of the options; `shape`: further arguments of `start_ray_cluster`.

    Raises:
        OptionError: a resource or a label has no such form.
    """
    from pathways.cluster.ray_cluster import start_ray_cluster
    from pathways.cluster.ray_resources import RayPlacement

    placement = RayPlacement(
        {name: _amount(name, amount) for name, amount in _pairs("--resource", asked["resource"])} or None,
        address=asked["ray_address"] or "auto",
        strategy=asked["strategy"] or "SPREAD",
        labels=dict(_pairs("--label", asked["label"])) or None,
        wait_for_resources=asked["wait_for_resources"],
    )
    if asked["start_timeout"] is not None:
        shape["start_timeout_s"] = asked["start_timeout"]
    shape |= {"nodes_per_island": asked["nodes_per_island"] or 1}
    shape |= {name: asked[name] for name in ("fabric", "trusted_fabric")}
    return start_ray_cluster(placement, listening=where, **shape)


def taken_ray_options(given: dict[str, Any], on: str) -> dict[str, Any]:
    """Takes the values of the options out of `given`.

    Raises:
        OptionError: one is given, and the cluster is not on Ray.
    """
    asked = {name: given.pop(name) for name in _NAMES}
    if on != "ray" and (found := [name for name, value in asked.items() if value]):
        raise errors.OptionError(f"--{found[0].replace('_', '-')} goes with --on ray")
    return asked


def _pairs(option: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise errors.OptionError(f"{option} expects NAME=VALUE, got {text!r}")
        pairs.append((name, value))
    return pairs


def _amount(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise errors.OptionError(f"--resource expects an amount of {name}, got {text!r}") from None
