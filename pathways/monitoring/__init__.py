"""What people and machines watch a cluster by: metrics for Prometheus or OpenTelemetry, a health check, the dashboard.

Each is a process beside the cluster (`pathways metrics`, `pathways dashboard`), which reads what `pathways top` reads.
"""
