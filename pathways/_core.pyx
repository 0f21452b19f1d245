# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The hot path between Python and the native core: submit, futures, host buffers, and a host's enqueue loop.

This file is the table of contents. `_core.pxd` declares what is used of the native core. The parts are files of their
own, which the includes below name. They are one module, so that calls between them are C calls. Segments come from
`pathways._native` by address.
"""
cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE, PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_Fetch, PyErr_NormalizeException, PyErr_SetInterrupt
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from threading import local as _thread_local


cdef extern from "Python.h":
    PyObject* PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t nargsf, PyObject* kwnames)
    PyObject* PyObject_CallMethodNoArgs(PyObject* self, PyObject* name)
    PyObject* PyTuple_GET_ITEM_ "PyTuple_GET_ITEM"(PyObject*, Py_ssize_t)
    PyObject* PyList_GET_ITEM_ "PyList_GET_ITEM"(PyObject*, Py_ssize_t)
    int PyTuple_CheckExact_ "PyTuple_CheckExact"(PyObject*)
    int PyList_CheckExact_ "PyList_CheckExact"(PyObject*)
    PyObject* Py_TYPE_ "(PyObject*)Py_TYPE"(PyObject*)
    Py_ssize_t Py_REFCNT_ "Py_REFCNT"(PyObject*)
    void Py_XDECREF_ "Py_XDECREF"(PyObject*)
    void Py_INCREF_ "Py_INCREF"(PyObject*)
    void Py_DECREF_ "Py_DECREF"(PyObject*)
    PyObject* Py_True_ "Py_True"
    unsigned long PyThread_get_thread_ident()
    ctypedef struct PyTypeObject:
        PyObject* (*tp_new)(PyTypeObject*, PyObject*, PyObject*) except NULL

# The longest native wait before Python checks for signals and for a cluster that is gone.
cdef int64_t _LOOK_NS = 50_000_000
cdef int64_t _PUMP_NS = 10_000_000  # embedded: how long one call runs what is ready

# What a client's process uses.
include "_array.pxi"             # Layout, Buffer: an array's kind and its handle
include "_client.pxi"            # Client: its futures, its commands, its memory
include "_call.pxi"              # Call: one compiled signature of a program
include "_trees.pxi"             # Tree: the nesting of what a call takes and returns
# What both use.
include "_memory.pxi"            # BlockView: a block of shared memory; leases
include "_interrupts.pxi"        # Interrupts: Ctrl-C, when one process is the whole cluster
# What a host uses.
include "_network_transfer.pxi"  # transfers to and from hosts on other machines
include "_host.pxi"              # Host: the native executor, and the enqueue loop
include "_host_callbacks.pxi"    # the functions that the native executor calls
