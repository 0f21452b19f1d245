"""The metrics of a cluster as Prometheus reads them, and its health. `pathways metrics` serves them.

The cluster is asked when somebody asks here, so nothing is done in between; many who ask get one answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from pathways import errors
from pathways.cluster.snapshots import Snapshot, Snapshots
from pathways.monitoring.client_labels import ClientLabels
from pathways.monitoring.local_server import Answer, Request, Resource
from pathways.monitoring.metric_table import METRICS, Look, Metric

#: Answers to who asks within this time, in seconds, are the same.
MAX_AGE_S = 0.5
#: The metric that says whether the cluster answers; the others are missing when it does not.
UP = "pathways_up"
UP_MEANING = "1: the cluster's controller answers."


class ClusterMetrics:
    """Reads all metrics. Any thread may call."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._lock = threading.Lock()
        self._clients = ClientLabels()  # guarded by _lock
        self._last: Snapshot | None = None
        self._values: list[tuple[Metric, Mapping[tuple[str, ...], float]]] = []

    def read(self) -> list[tuple[Metric, Mapping[tuple[str, ...], float]]]:
        """Each metric, with its values by the values of its labels; none when the cluster does not answer."""
        with self._lock:
            try:
                snapshot = self._snapshots.look(MAX_AGE_S)
            except errors.PathwaysError:
                return []
            if snapshot is not self._last:
                self._last = snapshot
                self._clients.add(snapshot.stats)
                look = Look(snapshot.stats, self._clients)
                self._values = [(metric, _summed(metric, look)) for metric in METRICS]
            return self._values


def _summed(metric: Metric, look: Look) -> Mapping[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in metric.read(look):
        sums[labels] = sums.get(labels, 0.0) + value
    return sums


class _Collector:
    """What prometheus_client asks."""

    def __init__(self, metrics: ClusterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._metrics.read()
        yield GaugeMetricFamily(UP, UP_MEANING, value=bool(found))
        for metric, values in found:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.meaning, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def check_installed() -> None:
    """Raises:
    OptionError: the package prometheus_client is missing.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise errors.OptionError(
            "metrics need the package prometheus_client, which is not installed here: "
            "pip install 'pathways-jax[metrics]'"
        ) from None


def resources(snapshots: Snapshots, metrics: ClusterMetrics) -> dict[str, Resource]:
    """What a port of metrics serves."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry()
    registry.register(_Collector(metrics))

    def text(request: Request) -> Answer:
        encoder, content_type = choose_encoder(request.accept)
        return Answer(encoder(registry), content_type)

    return {"/metrics": Resource(text), "/healthz": Resource(lambda _: health(snapshots), is_open=True)}


def health(snapshots: Snapshots) -> Answer:
    """200 when the cluster can work, with what is not as it should be; else 503 with the reason."""
    try:
        hosts = snapshots.look(MAX_AGE_S).stats.hosts
    except errors.PathwaysError as error:
        return Answer(f"no cluster answers: {type(error).__name__}\n".encode(), status=503)
    up = sum(host.state == "up" for host in hosts)
    if not up:
        return Answer(f"none of {len(hosts)} hosts is up\n".encode(), status=503)
    return Answer(f"ok: {up} of {len(hosts)} hosts are up\n".encode())
