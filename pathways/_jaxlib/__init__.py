"""The ONE door to the private parts of jax and jaxlib, one small function each.

The rest of the package calls these functions as `_jaxlib.name`. Nothing else in the project may import `jax._src`,
`jaxlib._jax` or `jaxlib.mlir`. Each function is tested per jaxlib version, in
`tests/python/compiler/test_jaxlib_door.py`. Known versions: `OLDEST <= jaxlib < TOO_NEW` (`versions`); `check_versions`
refuses any other.

The modules, by subject: `versions`, `processes`, `thread_state`, `user_settings`, `tracebacks`; values are `arrays` and
`physical_form`; a program goes from `jaxprs` through `references`, `effects`, `callbacks`, `callback_order` and
`lowering` to `mlir_modules` and the `partitioner` (`compiler_log` keeps it quiet); a host runs it by `executables`,
`raw_modules`, `compile_cache` and `callback_hosting`; `foreign_arrays`, `foreign_shardings` and `slice_meshes` teach
JAX types of ours; `colocated` is for processes that run functions of programs of plain JAX; `profiling` is for
`pw.profile`.

The functions, and JAX with them, are imported when one is first used. A controller uses `coordination` alone, and does
without JAX. Nothing here initialises a backend, so a client can trace, partition and lower without an accelerator.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathways._jaxlib.door import *  # noqa: F403
else:

    def __getattr__(name):
        globals()[name] = found = getattr(importlib.import_module("pathways._jaxlib.door"), name)
        return found
