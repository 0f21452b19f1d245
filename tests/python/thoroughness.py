"""How much property tests that compile in each example do."""

import os

#: Multiplies their numbers of examples; `make stress` sets 4.
THOROUGHNESS = int(os.environ.get("PATHWAYS_THOROUGHNESS", "1"))
