"""The command `pathways bench`: options in, a table, JSON and a results folder out. No measuring happens here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import rich.console

from pathways.bench import report as reports
from pathways.process.console import standard_output


class _Integers(click.ParamType[tuple[int, ...]]):
    name = "n,n,..."

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < self._least:
            what = "positive integers" if self._least == 1 else f"integers from {self._least} on"
            self.fail(f"expected {what} with commas between them, got {value!r}", param, ctx)
        return numbers


def _names(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


_out = click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON here.")
_plot = click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture here."
)
_results = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write <what>-<commit>-<cpu>.json and .md into this folder.",
)


def _publish(report: reports.Report, json_path: Path | None, results: Path | None) -> None:
    console = standard_output()
    report.show(console)
    written = report.save(results) if results else []
    if json_path:
        json_path.write_text(report.as_json())
        written.append(json_path)
    for path in written:
        console.print(f"wrote {path}", highlight=False)


def _draw(
    picture: Callable[[Any, Path], None],
    report: reports.Report,
    plot_path: Path | None,
    results: Path | None,
    data: str = "rows",
) -> None:
    """A picture of the report's data: where it was asked for, or in the folder of results beside its tables."""
    from pathways.bench import machine

    if results and plot_path is None:
        results.mkdir(parents=True, exist_ok=True)
        plot_path = results / f"{machine.result_name(report.what, report.machine)}.png"
    if plot_path:
        picture(report.data[data], plot_path)


_machines = click.option(
    "--machines",
    type=click.IntRange(0),
    default=0,
    help="Measure between so many machines: agents on this one, over loopback addresses.",
)


def _rivals(given: str | None, known: Sequence[str]) -> list[str]:
    """Those that were named; all by default."""
    return list(known) if given is None else _names(given)


@click.group()
def bench() -> None:
    """Measure the runtime beside its rivals."""


@bench.command()
@_machines
@click.option("--hosts", type=_Integers(), default="1,2", show_default=True, help="Host processes.")
@click.option("--devices", type=_Integers(), default="1,2", show_default=True, help="CPU devices per host.")
@click.option("--systems", default="pathways", show_default=True, help="What of ours to measure; may be empty.")
@click.option(
    "--rivals",
    help="Any of jax, ray, ray-graph (jax by default); between machines any of tls, tcp, grpc, jax_transfer (all).",
)
@click.option("--workloads", "kinds", default="OpByOp,Chained,Fused", show_default=True)
@click.option("--collective", type=click.Choice(["both", "yes", "no"]), default="both", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0, show_default=True, help="Length of one run.")
@_plot
@_out
@_results
def dispatch(
    machines: int,
    hosts: tuple[int, ...],
    devices: tuple[int, ...],
    systems: str,
    rivals: str | None,
    kinds: str,
    collective: str,
    repeats: int,
    seconds: float,
    plot_path: Path | None,
    json_path: Path | None,
    results: Path | None,
) -> None:
    """Figure 5 of the paper: dispatches per second of every system, interleaved.

    With --machines, calls on hosts that agents brought, beside those on one machine and bare round trips.
    """
    from benchmarks.machines import dispatch as far_dispatch
    from benchmarks.machines import transfer as far_transfer
    from pathways.bench import dispatch_report

    try:
        if machines:
            known = _rivals(rivals, far_transfer.RIVALS)
            _publish(far_dispatch.run(machines, known, repeats, seconds), json_path, results)
            return
        report = dispatch_report.run(
            shapes=[(h, d) for h in hosts for d in devices],
            names=list(dict.fromkeys(_names(systems) + _rivals(rivals, ["jax"]))),
            kinds=_names(kinds),
            collective={"both": (True, False), "yes": (True,), "no": (False,)}[collective],
            repeats=repeats,
            seconds=seconds,
        )
        if plot_path:
            from pathways.bench import plot

            plot.figure5(report.data["rows"], plot_path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _publish(report, json_path, results)


@bench.command()
@click.option("--max-shards", type=click.IntRange(4), help="65536 by default; not with --agents.")
@click.option("--devices-per-host", type=click.IntRange(1), help="4 by default; 1 with --agents.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--agents",
    type=click.IntRange(1),
    help="Measure a real controller instead, with so many modelled machines that join it from this one.",
)
@click.option("--hosts-per-agent", type=click.IntRange(1), help="Hosts of each modelled machine: 1 by default.")
@click.option("--runs", type=click.IntRange(1), help="Pipelined runs of a measurement with --agents: 1000 by default.")
@click.option(
    "--idle-seconds",
    type=click.FloatRange(0, min_open=True),
    help="How long the idle controller of --agents is watched: 10 s by default.",
)
@_out
@_results
def scale(
    max_shards: int | None,
    devices_per_host: int | None,
    repeats: int,
    agents: int | None,
    hosts_per_agent: int | None,
    runs: int | None,
    idle_seconds: float | None,
    json_path: Path | None,
    results: Path | None,
) -> None:
    """The control path over modelled devices: cost per call, per host and run, bytes per buffer and plan.

    With --agents, what a cluster of many machines costs its controller: to join, when it is idle, and per host and run.
    """
    from benchmarks.scale import control_path as scales

    if agents is not None:
        if max_shards is not None:
            raise click.UsageError("--max-shards is for the simulation: leave it out, or leave out --agents")
        _publish(
            _scale_agents(agents, hosts_per_agent, devices_per_host, runs, repeats, idle_seconds), json_path, results
        )
        return
    given = {"--hosts-per-agent": hosts_per_agent, "--runs": runs, "--idle-seconds": idle_seconds}
    if alone := [name for name, value in given.items() if value is not None]:
        raise click.UsageError(f"{', '.join(alone)}: only with --agents, which says how many machines there are")
    try:
        _publish(scales.run(max_shards or 65536, devices_per_host or 4, repeats), json_path, results)
    except scales.NoSimulation as error:
        raise click.ClickException(str(error)) from None


def _scale_agents(
    agents: int,
    hosts_per_agent: int | None,
    devices_per_host: int | None,
    runs: int | None,
    repeats: int,
    idle_seconds: float | None,
) -> reports.Report:
    from benchmarks.scale import agents as scale_agents

    console = rich.console.Console(stderr=True)
    settings = scale_agents.Settings(
        agents, hosts_per_agent or 1, devices_per_host or 1, runs or 1000, repeats, idle_seconds or 10.0
    )
    try:
        return scale_agents.run(settings, lambda text: console.print(text, markup=False, highlight=False))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@click.option("--binaries", type=click.Path(file_okay=False, path_type=Path), help="Folder of the C++ benchmarks.")
@_out
@_results
def instructions(binaries: Path | None, json_path: Path | None, results: Path | None) -> None:
    """Instructions of the control path by callgrind: with a trace, by policy, beside many live buffers."""
    from benchmarks import instructions as counts

    try:
        report = counts.run(counts.counter(counts.find_program(binaries)))
    except counts.NoCounter as error:
        raise click.ClickException(str(error)) from None
    _publish(report, json_path, results)


@bench.command()
@click.option("--only", default="", help="Names of probes, with commas; all by default.")
@click.option("--binaries", type=click.Path(file_okay=False, path_type=Path), help="Folder of the C++ benchmarks.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@_out
@_results
def micro(only: str, binaries: Path | None, repeats: int, json_path: Path | None, results: Path | None) -> None:
    """Single costs: futures, ring hops, a call, a plan, a transfer."""
    from pathways.bench import micro as micros

    try:
        _publish(micros.run(_names(only), binaries, repeats), json_path, results)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@bench.command()
@_machines
@click.option(
    "--rivals",
    help="Any of memcpy, jax_transfer (all by default); between machines any of tls, tcp, grpc, jax_transfer.",
)
@click.option("--devices", type=_Integers(), default="1,2", show_default=True, help="CPU devices per host.")
@click.option(
    "--kib",
    type=_Integers(),
    help="Sizes; by default 4,16,64,256,1024,4096,16384,65536, and 4,1024,65536 between machines.",
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.01), default=0.3, show_default=True, help="Length of one run.")
@_plot
@_out
@_results
def transfer(
    machines: int,
    rivals: str | None,
    devices: tuple[int, ...],
    kib: tuple[int, ...] | None,
    repeats: int,
    seconds: float,
    plot_path: Path | None,
    json_path: Path | None,
    results: Path | None,
) -> None:
    """Bytes between two host processes of one machine, rows to rows and rows to columns, beside rivals.

    With --machines, between those of two machines.
    """
    from pathways.bench import plot
    from pathways.bench import transfer as transfers

    if machines:
        _transfer_between(machines, rivals, kib, repeats, seconds, json_path, results)
        return
    sizes = [1024 * size for size in kib] if kib else transfers.SIZES
    try:
        report = transfers.run(_rivals(rivals, transfers.RIVALS), devices, sizes, repeats, seconds)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _draw(plot.transfers, report, plot_path, results)
    _publish(report, json_path, results)


def _transfer_between(
    machines: int,
    rivals: str | None,
    kib: tuple[int, ...] | None,
    repeats: int,
    seconds: float,
    json_path: Path | None,
    results: Path | None,
) -> None:
    from benchmarks.machines import transfer as far_transfer

    sizes = [1024 * size for size in kib or (4, 1024, 65536)]
    try:
        report = far_transfer.run(machines, _rivals(rivals, far_transfer.RIVALS), sizes, repeats, seconds)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _publish(report, json_path, results)


@bench.command()
@click.option("--only", default="rates,shares,waits,dispatch", show_default=True, help="What to measure.")
@click.option("--rivals", default="jax", show_default=True, help="Any of jax; for the rates.")
@click.option("--clients", type=_Integers(), default="1,2,4,8,16", show_default=True, help="Client processes.")
@click.option("--us", type=_Integers(), default="40,330,1040,2400", show_default=True, help="Of a computation.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Length of one measurement."
)
@click.option("--share-seconds", type=click.IntRange(2), default=8, show_default=True, help="In which shares are seen.")
@_plot
@_out
@_results
def tenants(
    only: str,
    rivals: str,
    clients: tuple[int, ...],
    us: tuple[int, ...],
    repeats: int,
    seconds: float,
    share_seconds: int,
    plot_path: Path | None,
    json_path: Path | None,
    results: Path | None,
) -> None:
    """Figures 8 and 9 of the paper: what many clients get of one cluster, together and each; and how long they wait."""
    from benchmarks.tenants import measuring as measured
    from benchmarks.tenants import plot as tenants_plot
    from benchmarks.tenants import report as tenants_report

    console = rich.console.Console(stderr=True)
    settings = measured.Settings(clients, us, _names(rivals), repeats, seconds, float(share_seconds))
    try:
        report = tenants_report.run(
            _names(only), settings, lambda text: console.print(text, markup=False, highlight=False)
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if report.data["rows"].get("rates") or report.data["rows"].get("shares"):
        _draw(tenants_plot.picture, report, plot_path, results)
    _publish(report, json_path, results)


@bench.command()
@click.option(
    "--only", default="pipeline,hosts,slice,turns,exchange,mixture", show_default=True, help="What to measure."
)
@click.option("--pipeline-us", type=click.IntRange(100), default=10_000, show_default=True, help="Of a stage's step.")
@click.option("--hosts-us", type=click.IntRange(1), default=300, show_default=True, help="Of a call on two hosts.")
@click.option("--repeats", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=0.3, show_default=True, help="Length of one measurement."
)
@_plot
@_out
@_results
def mpmd(
    only: str,
    pipeline_us: int,
    hosts_us: int,
    repeats: int,
    seconds: float,
    plot_path: Path | None,
    json_path: Path | None,
    results: Path | None,
) -> None:
    """Pipelines, loops over slices, exchanges of rows, mixtures of experts: what SPMD cannot say, and what it costs."""
    from benchmarks.mpmd import measuring as measured
    from benchmarks.mpmd import plot as mpmd_plot

    console = rich.console.Console(stderr=True)
    settings = measured.Settings(pipeline_us=pipeline_us, hosts_us=hosts_us, repeats=repeats, seconds=seconds)
    try:
        report = measured.run(_names(only), settings, lambda text: console.print(text, markup=False, highlight=False))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _draw(mpmd_plot.picture, report, plot_path, results, "goals")
    _publish(report, json_path, results)
