"""`python -m benchmarks.mpmd`."""

from benchmarks.mpmd.measuring import Settings, run
from benchmarks.mpmd.plot import picture
from pathways.bench.command import as_command

command = as_command("mpmd", Settings, run, picture)

if __name__ == "__main__":
    command()
