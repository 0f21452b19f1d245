"""`python -m benchmarks.scale`."""

from benchmarks.scale.control_path import Settings, run
from pathways.bench.command import as_command

command = as_command("scale", Settings, run)

if __name__ == "__main__":
    command()
