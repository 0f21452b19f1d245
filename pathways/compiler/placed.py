"""Placed functions: `jax.jit` of the user's function under a tagged name that says which slice it runs on.

JAX keeps the name of a jit equation through JVP, partial evaluation, transposition and batching. So in the jaxpr of a
whole program the name of every step still says where the step runs; `flatten` looks the tag up here. We define no
differentiation rule.

Shardings become ordinary `with_sharding_constraint`s on the function's arguments and results, inside the jit. Then
JAX's own rules give a cotangent the sharding of its value, and leave a batched dimension uncut.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways import _jaxlib, errors
from pathways.compiler import specs
from pathways.compiler.added_primitives import transfers
from pathways.compiler.ir import MeshSpec
from pathways.compiler.statics import Static

_MARK = "__pw"


@dataclasses.dataclass(frozen=True)
class SliceTag:
    """What a tag means: the user's name for the function, and the slice it runs on."""

    name: str
    mesh: MeshSpec


_lock = threading.Lock()
_tags: dict[SliceTag, str] = {}  # guarded by _lock; grows with the distinct slice tags of this process
_slice_tags: dict[str, SliceTag] = {}  # guarded by _lock


def _tag(slice_tag: SliceTag) -> str:
    with _lock:
        tag = _tags.get(slice_tag)
        if tag is None:
            tag = f"{slice_tag.name}{_MARK}{len(_tags)}"
            _tags[slice_tag] = tag
            _slice_tags[tag] = slice_tag
        return tag


def lookup(jit_name: str) -> SliceTag | None:
    """The slice tag of a jit equation with this name, or None for a plain jit."""
    return _slice_tags.get(jit_name) if _MARK in jit_name else None


def staged(fun: Callable[..., Any], name: str, static_argnums: Sequence[int], static_argnames: Sequence[str]) -> Any:
    """A program's function as a jit whose name marks it as a program.

    JAX may trace it, but must not lower it for this process: `refuse_elsewhere` prevents that.
    """
    body = functools.wraps(fun, updated=())(functools.partial(fun))
    body.__name__ = body.__qualname__ = f"{name}{_MARK}_program"
    return jax.jit(body, static_argnums=tuple(static_argnums) or None, static_argnames=tuple(static_argnames) or None)


def refuse_elsewhere(jit_name: str) -> None:
    """Raises if a jit equation that JAX is about to lower for this process is a placed function or a program.

    Tracing one is harmless (`jax.eval_shape`, `jax.make_jaxpr`). But it must run on its slice, not in this process.
    """
    slice_tag = lookup(jit_name)
    name, mark, rest = jit_name.rpartition(_MARK)
    if slice_tag is not None:
        what = f"placed function {slice_tag.name!r}"
    elif mark and rest == "_program":
        what = f"program {name!r}"
    else:
        return
    raise errors.TraceError(
        f"{what} was called inside a function that jax.jit (or scan, or the like) compiles for this process. Call it "
        "outside, or make the whole a program: pw.program(...). A transformation of a program with an exchange "
        "belongs in it: pw.program(jax.grad(f)) instead of jax.grad(pw.program(f))"
    )


class TaggedFunction:
    """`fun` placed on `mesh`. A call under trace becomes one named computation of the program.

    A call on concrete arrays is a plain `jax.jit` call: the caller must make it run on its slice.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: MeshSpec,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        static_argnums: int | Sequence[int] | None = (),
        static_argnames: str | Sequence[str] | None = (),
        name: str | None = None,
    ) -> None:
        """Shardings are pytree prefixes of PartitionSpecs; None leaves the choice to the compiler.

        `in_shardings` is for the positional arguments that are not static: one spec for all, or a tuple.
        """
        if not callable(fun):
            raise errors.ProgramError(
                f"expected a function to place on slice {mesh.name!r}, got {fun!r} of type {type(fun).__name__}"
            )
        self.fun = fun
        self.mesh = mesh
        self.name = name or function_name(fun)
        self.abstract_mesh = specs.abstract_mesh(mesh)
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.static_argnums, self.static_argnames = both_forms(fun, static_argnums, static_argnames)
        check_arguments(
            fun,
            self.name,
            static=(static_argnums, static_argnames, self.static_argnums, self.static_argnames),
            donate=(None, None, (), ()),
        )
        self.slice_tag = SliceTag(self.name, mesh)
        self.__name__ = self.name
        self.__doc__ = getattr(fun, "__doc__", None)
        self.__wrapped__ = fun

        this = weakref.ref(self)  # no cycle, so that what the user's function closes over goes with the last reference

        @functools.wraps(fun, updated=())  # then JAX's messages name the user's function and file
        def body(*args: Any, **kwargs: Any) -> Any:
            tagged = this()
            assert tagged is not None, "JAX traces it in a call of it"
            return _call(tagged, *args, **kwargs)

        body.__name__ = body.__qualname__ = _tag(self.slice_tag)
        self._jit = jax.jit(
            body, static_argnums=self.static_argnums or None, static_argnames=self.static_argnames or None
        )

    @_jaxlib.outside_meshes
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as JAX traces it. In its body the mesh of the slice is set, and no other."""
        if self.static_argnums or self.static_argnames:
            dynamic = set(self.dynamic(len(args)))
            args = tuple(arg if n in dynamic else Static(arg) for n, arg in enumerate(args))
            kwargs = {key: Static(arg) if key in self.static_argnames else arg for key, arg in kwargs.items()}
        return self._jit(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's own trace of the function for whoever runs it without a cluster, a `jax.stages.Traced`."""
        return self._jit.trace(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets the traces of the function that JAX keeps."""
        self._jit.clear_cache()

    def __repr__(self) -> str:
        return f"<placed function {self.name!r} on slice {self.mesh.name!r}>"

    def dynamic(self, count: int) -> list[int]:
        """Which of `count` positional arguments are not static."""
        static = {n % count for n in self.static_argnums if -count <= n < count}
        names = parameter_names(self.fun, count)
        return [n for n in range(count) if n not in static and names[n] not in self.static_argnames]


def _parameters(fun: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """A function's parameters; None: they are not known."""
    try:
        return list(inspect.signature(fun).parameters.values())
    except (ValueError, TypeError):
        return None


def both_forms(
    fun: Callable[..., Any], numbers: int | Sequence[int] | None, names: str | Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Both the numbers and the names of arguments, so that a call may give them by position or by keyword.

    As in `jax.jit`: if only one of the two is given, the other is computed from it; if both are given, they stay.
    """
    numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    if bool(numbers) == bool(names):
        return numbers, names
    parameters = _parameters(fun)
    if parameters is None:
        return numbers, names
    either = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else None for p in parameters]
    if names:
        return tuple(n for n, name in enumerate(either) if name in names), names
    count = len(either)
    return numbers, tuple(name for number in numbers if -count <= number < count and (name := either[number]))


def function_name(fun: Callable[..., Any]) -> str:
    """A function's name for plans and messages; the name of a lambda has its file and line."""
    name = str(getattr(fun, "__name__", type(fun).__name__))
    if name != "<lambda>":
        return name
    code = getattr(inspect.unwrap(fun), "__code__", None)  # finds the user's own lambda inside `jax.grad` too
    if code is None:
        return name
    return f"<lambda> at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def check_arguments(
    fun: Callable[..., Any],
    name: str,
    *,
    static: tuple[Any, Any, Sequence[int], Sequence[str]],
    donate: tuple[Any, Any, Sequence[int], Sequence[str]],
) -> None:
    """Refuses names of arguments that a function does not take, and arguments that are both static and donated.

    `static` and `donate` each have the numbers and the names as the user gave them, then as `both_forms` made them.
    """
    parameters = _parameters(fun) or []
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option, given in (("static_argnames", static[1]), ("donate_argnames", donate[1])):
            for argument in (given,) if isinstance(given, str) else tuple(given or ()):
                if argument not in takes:
                    near = difflib.get_close_matches(argument, takes, 1)
                    raise errors.ProgramError(
                        f"{option} of {name!r} names {argument!r}, which is no argument of it"
                        f"{f'; did you mean {near[0]!r}?' if near else '.'} It takes {takes}"
                    )
    both = [f"number {n}" for n in sorted({*static[2]} & {*donate[2]})]
    both += [repr(argument) for argument in sorted({*static[3]} & {*donate[3]})]
    if both:
        raise errors.ProgramError(
            f"argument {both[0]} of {name!r} is static and donated; a static argument is no array, so there is nothing "
            "to donate"
        )


def positional_parameters(fun: Callable[..., Any]) -> int | None:
    """How many positional arguments a function takes at most; None: any number, or not known."""
    parameters = _parameters(fun)
    if parameters is None or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def parameter_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional parameters, for error messages."""
    names: list[str] = []
    for parameter in _parameters(fun) or []:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}[{n}]" for n in range(count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    names.extend(f"argument {n}" for n in range(len(names), count))
    return names[:count]


def _call(self: TaggedFunction, *args: Any, **kwargs: Any) -> Any:
    """The body of a placed function, as JAX traces it. It adds to an exception a note that names the function."""
    args = tuple(arg.value if type(arg) is Static else arg for arg in args)
    kwargs = {key: arg.value if type(arg) is Static else arg for key, arg in kwargs.items()}
    try:
        return _traced(self, args, kwargs)
    except Exception as error:
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_NOTE} {self.name!r}{_source(self.fun)} on slice {self.mesh.name!r}{_got(args, kwargs)}")
        raise


_NOTE = "This happened while tracing placed function"
#: How many arguments a note shows, with their types.
_SHOWN = 8


def _source(fun: Any) -> str:
    """Where a function was written."""
    code = getattr(inspect.unwrap(fun), "__code__", None) if callable(fun) else None
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _got(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    words = []
    for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, jax.Array):
            where = jax.tree_util.keystr(path[1:])
            words.append(f"{where[1:-1] if path[0].idx else where} {jax.typeof(leaf).str_short()}")
    more = "" if len(words) <= _SHOWN else f", and {len(words) - _SHOWN} more"
    return f" for arguments {', '.join(words[:_SHOWN])}{more}" if words else ""


def _traced(self: TaggedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with jax.sharding.use_abstract_mesh(self.abstract_mesh):
        dynamic = self.dynamic(len(args))
        if self.in_shardings is not None:
            names = parameter_names(self.fun, len(args))
            given = tuple(args[n] for n in dynamic)
            constrain = functools.partial(
                _constrain, self, self.in_shardings, given, "argument", [names[n] for n in dynamic]
            )
            merged = dict(zip(dynamic, constrain(), strict=True))
            args = tuple(merged.get(n, x) for n, x in enumerate(args))
        enter = functools.partial(transfers.entered, mesh=self.mesh)
        args = tuple(jax.tree.map(enter, x) if n in dynamic else x for n, x in enumerate(args))
        kwargs = {k: x if k in self.static_argnames else jax.tree.map(enter, x) for k, x in kwargs.items()}
        result = self.fun(*args, **kwargs)
        if self.in_shardings is not None and any(map(_jaxlib.is_traced_reference, jax.tree.leaves(args))):
            constrain()  # a reference's new value lies as the old one did
        if self.out_shardings is not None:
            result = _constrain(self, self.out_shardings, result, "result", None)
        return result


def _constrain(self: TaggedFunction, prefix: Any, tree: Any, what: str, names: Sequence[str] | None) -> Any:
    wanted = specs.broadcast(prefix, tree, f"{what} shardings of placed function {self.name!r}")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    out = []
    for (path, leaf), spec in zip(leaves, wanted, strict=True):
        if spec is not None:
            where = jax.tree_util.keystr(path)
            if names is not None:
                where = names[path[0].idx] + jax.tree_util.keystr(path[1:])
            shape = jax.numpy.shape(leaf)
            dims = specs.normalize(spec, shape, self.mesh, f"{what} {where} of placed function {self.name!r}")
            if _jaxlib.is_traced_reference(leaf):
                leaf[...] = transfers.constrained(leaf[...], self.mesh, dims)
            else:
                leaf = transfers.constrained(transfers.entered(leaf, self.mesh), self.mesh, dims)
        out.append(leaf)
    return jax.tree_util.tree_unflatten(treedef, out)
