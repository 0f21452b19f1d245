"""`python -m benchmarks.tenants`."""

from benchmarks.tenants.measuring import Settings
from benchmarks.tenants.plot import picture
from benchmarks.tenants.report import run
from pathways.bench.command import as_command

command = as_command("tenants", Settings, run, picture)

if __name__ == "__main__":
    command()
