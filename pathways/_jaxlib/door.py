"""All functions of this package, for `pathways/_jaxlib/__init__.py`, which imports them when one is first used."""

# ruff: noqa: F401

import jax  # before jaxlib: JAX sets what jaxlib reads when it is loaded
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy

from pathways._jaxlib.arrays import (
    ARRAY_TYPE,
    abstract_value,
    address_of,
    array_attributes,
    array_format,
    array_operators,
    assemble,
    is_concrete,
    is_tracer,
    shaped_array,
    shards_of,
    struct,
    valid_jaxtype,
)
from pathways._jaxlib.callback_order import in_order, jaxpr_in_order, order_var
from pathways._jaxlib.callbacks import (
    Callback,
    CallsBack,
    callback_name,
    callbacks_of,
    calls_back,
    wait_for_effects_also,
)
from pathways._jaxlib.colocated import common_objects, use_colocated_devices
from pathways._jaxlib.compile_cache import compile_anew, has_compile_cache, keep_executables
from pathways._jaxlib.compiler_log import quiet
from pathways._jaxlib.effects import effect_name, has_effects, source_of, unknown_effect
from pathways._jaxlib.executables import (
    direct_call,
    ignore_unused_donations,
    initialize_lapack,
    module_primitive,
    run_alone,
)
from pathways._jaxlib.foreign_arrays import accept_arrays, users_level
from pathways._jaxlib.foreign_shardings import accept_shardings
from pathways._jaxlib.ifrt_programs import IfrtArray, IfrtProgram, mpmd_compile_options, read_ifrt_program
from pathways._jaxlib.jaxprs import (
    DropVar,
    Literal,
    Scope,
    as_function,
    bind_jit,
    closed_jaxpr,
    equation_context,
    evaluated,
    extend_jit,
    in_low_terms,
    is_jaxpr,
    is_plain_parameter,
    is_transposed,
    jaxprs_in,
    jit_of,
    jit_p,
    live,
    new_jaxpr,
    new_literal,
    new_var,
    opened,
    scan_counts,
    scan_of,
    scope_of,
    solver_of,
    sub_jaxprs,
    transposed_times,
)
from pathways._jaxlib.lowering import (
    forget_meshes,
    guard_lowering,
    is_lowering_for_slices,
    lower_jaxpr,
    lowering_for_slices,
)
from pathways._jaxlib.mlir_modules import (
    drop_main_attributes,
    main_function,
    mesh_axes,
    mlir_context,
    parse,
    parse_portable,
    portable_bytecode,
    shape_and_dtype,
    standalone,
    strip_locations,
    tensor_type,
)
from pathways._jaxlib.operands import Wider, pass_down, put_last_at, takes_more, teach_pass_down
from pathways._jaxlib.partitioner import forward_barrier, lower_to_ifrt, mpmd_return, named_computation, partition
from pathways._jaxlib.physical_form import (
    cross_physically,
    from_physical,
    is_complex,
    is_key,
    is_sub_byte,
    key_name,
    logical_dtype,
    physical,
    physical_struct,
    to_physical,
)
from pathways._jaxlib.processes import (
    clear_also,
    collect_garbage,
    drop_tracebacks,
    initialized_backends,
    is_forked,
    join_island,
    keep_threads_of_parent,
    told_by_all,
)
from pathways._jaxlib.profiling import start_profile, stop_profile
from pathways._jaxlib.proxy_platform import backend_target, use_proxy
from pathways._jaxlib.raw_modules import (
    Form,
    bitcast_module,
    by_default_layouts,
    compile_raw,
    form_of,
    op_sharding,
    raw_call,
    refuse_calls_of_python,
    shown,
    signature_of,
    tiled_sharding,
    tiles_of,
    without_tokens,
)
from pathways._jaxlib.references import (
    abstract_reference,
    accept_references,
    discharge_by,
    discharged,
    effects_at,
    hold,
    holder_of,
    is_reference,
    is_reference_type,
    is_traced_reference,
    own_copy,
    plain_holder,
    reference_type,
)
from pathways._jaxlib.slice_meshes import (
    accept_slice_meshes,
    outside_other_meshes,
    slice_explicit,
    slice_mesh,
    slice_name,
)
from pathways._jaxlib.thread_state import (
    current_level,
    is_jit_disabled,
    is_recording,
    is_staging,
    is_top_level,
    staged_constant,
    staging_level,
    trace_modes,
    value_checks,
)
from pathways._jaxlib.tracebacks import keep_filter_answers
from pathways._jaxlib.user_settings import (
    guard_level,
    has_user_settings,
    is_mesh_set,
    no_mesh,
    no_user_settings,
    outside_meshes,
    unguarded,
)
from pathways._jaxlib.versions import VERSION, check_versions
