"""`Tree`: the nesting of what a call takes or returns. It takes a value of that nesting apart into its leaves, and puts
leaves together, as JAX does. Included by `_core.pyx`.

Most calls take and return tuples, lists, dicts and None. Of such trees it looks at the containers itself, because JAX
builds the whole structure of the value anew for each call, and then compares. All other trees are JAX's work.
Threading: immutable; with Python's lock held.
"""

from jax.tree_util import default_registry as _registry  # its functions have no Python frames


@cython.no_gc
cdef class _Node:
    """One container, leaf or None of a tree."""
    cdef object kind        # tuple, list or dict; None: a leaf; NoneType: None
    cdef tuple children
    cdef list keys          # of a dict, in JAX's order

    @cython.boundscheck(True)  # comparing a key may run code that changes a list
    cdef bint take(self, object value, object array_type, list leaves) except -1:
        """Appends the leaves of a value. False: it is another tree, or what one of its leaves is, only JAX knows."""
        cdef Py_ssize_t i, n = len(self.children)
        cdef object kind = self.kind
        if kind is None:
            if type(value) is not array_type and type(value) is not _ndarray:
                return False
            leaves.append(value)
            return True
        if type(value) is not kind:
            return False
        if kind is dict:
            if len(<dict>value) != n:
                return False
            for i in range(n):
                key = self.keys[i]
                if key not in <dict>value:
                    return False
                if not (<_Node>self.children[i]).take((<dict>value)[key], array_type, leaves):
                    return False
        elif kind is tuple:
            if len(<tuple>value) != n:
                return False
            for i in range(n):
                if not (<_Node>self.children[i]).take((<tuple>value)[i], array_type, leaves):
                    return False
        elif kind is list:
            if len(<list>value) != n:
                return False
            for i in range(n):
                if not (<_Node>self.children[i]).take((<list>value)[i], array_type, leaves):
                    return False
        return True

    cdef object fill(self, list leaves, Py_ssize_t* at):
        """The value whose leaves begin at `at`, which moves behind them."""
        cdef Py_ssize_t i, n = len(self.children)
        cdef list made
        cdef dict named
        if self.kind is None:
            i = at[0]
            at[0] = i + 1
            return leaves[i]
        if self.kind is dict:
            named = {}
            for i in range(n):
                named[self.keys[i]] = (<_Node>self.children[i]).fill(leaves, at)
            return named
        if self.kind is not tuple and self.kind is not list:
            return None
        made = [(<_Node>self.children[i]).fill(leaves, at) for i in range(n)]
        return made if self.kind is list else tuple(made)


cdef _Node _node_of(object tree):
    """None: JAX alone knows the types of its containers."""
    cdef _Node node = _Node.__new__(_Node)
    data = tree.node_data()
    if data is not None:
        node.kind = data[0]
        if node.kind is dict:
            node.keys = list(data[1])
        elif node.kind is not tuple and node.kind is not list and node.kind is not type(None):
            return None
    node.children = tuple([_node_of(child) for child in tree.children()])
    return None if None in node.children else node


cdef class Tree:
    """One nesting of values. `structure`: JAX's own; `array_type`: of arrays, which are leaves."""
    cdef object structure
    cdef object array_type
    cdef Py_ssize_t size
    cdef _Node root

    def __init__(self, structure not None, array_type not None):
        self.structure = structure
        self.array_type = array_type
        self.size = structure.num_leaves
        self.root = _node_of(structure)

    def leaves(self, value):
        """The leaves of a value; None: it is another tree."""
        cdef list found
        if self.root is not None:
            found = []
            if self.root.take(value, self.array_type, found):
                return found
        found, structure = _registry.flatten(value)
        return found if structure == self.structure else None

    def fill(self, list leaves not None):
        """The value with these leaves."""
        cdef Py_ssize_t at = 0
        if self.root is None or len(leaves) != self.size:
            return self.structure.unflatten(leaves)
        return self.root.fill(leaves, &at)
