"""Print what pyproject.toml requires, one requirement a line, for `pip install -r`.

    python scripts/requirements.py [EXTRA ...]

It lists the build requirements, the dependencies and the named extras; so `make` can fill an environment before it
builds, and need not build again when only an extra is added.
"""

import pathlib
import sys
import tomllib


def main() -> None:
    """Command line."""
    text = pathlib.Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    project = tables["project"]
    wanted = [*tables["build-system"]["requires"], *project["dependencies"]]
    for extra in sys.argv[1:]:
        wanted += project["optional-dependencies"][extra]
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main()
