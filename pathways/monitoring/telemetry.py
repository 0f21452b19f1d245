"""The metrics of a cluster by OpenTelemetry: the same ones as for Prometheus, pushed now and then by OTLP.

Where to, how often and as whom stands in OpenTelemetry's own variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_METRIC_EXPORT_INTERVAL` and `OTEL_RESOURCE_ATTRIBUTES`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pathways import errors
from pathways.monitoring.metric_table import METRICS, Metric
from pathways.monitoring.metrics import ClusterMetrics


@contextlib.contextmanager
def exporting(metrics: ClusterMetrics) -> Iterator[None]:
    """Exports while the block runs.

    Raises:
        OptionError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError:
        raise errors.OptionError(
            "--otlp needs packages that are not installed here: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        ) from None
    provider = provide(metrics, PeriodicExportingMetricReader(OTLPMetricExporter()))
    try:
        yield
    finally:
        provider.shutdown(5000)  # milliseconds: the last values are sent


def provide(metrics: ClusterMetrics, reader: Any) -> Any:
    """OpenTelemetry's provider of all metrics, for one reader of theirs."""
    from opentelemetry.sdk.metrics import MeterProvider

    provider = MeterProvider(metric_readers=[reader])
    meter = provider.get_meter("pathways")
    for metric in METRICS:
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        unit = {"seconds": "s", "bytes": "By"}.get(metric.unit, "1")
        make(metric.name.removesuffix("_total"), [_observe(metrics, metric)], unit, metric.meaning)
    return provider


def _observe(metrics: ClusterMetrics, metric: Metric) -> Callable[[Any], list[Any]]:
    from opentelemetry.metrics import Observation

    def observe(_: Any) -> list[Any]:
        values = dict(metrics.read()).get(metric, {})
        return [Observation(value, dict(zip(metric.labels, each, strict=True))) for each, value in values.items()]

    return observe
