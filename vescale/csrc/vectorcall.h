// What types have in common whose objects are called by Python's vectorcall protocol.

#pragma once

#include "interpreter.h"

#include <structmember.h>

#include <utility>

namespace vescale {

// The arguments of a call as a tuple and a dictionary.
inline std::pair<py::object, py::object> packed_arguments(PyObject* const* given, Py_ssize_t num_args, PyObject* names) {
    auto args = owned(PyTuple_New(num_args)), kwargs = owned(PyDict_New());
    for (Py_ssize_t i = 0; i < num_args; ++i) {
        PyTuple_SET_ITEM(args.ptr(), i, Py_NewRef(given[i]));
    }
    for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
        if (PyDict_SetItem(kwargs.ptr(), PyTuple_GET_ITEM(names, i), given[num_args + i]) != 0) {
            throw python_error();
        }
    }
    return {std::move(args), std::move(kwargs)};
}

// The Python type of `Called`, which has a member `call` and the functions `make`, `dealloc`, `traverse` and `clear`.
template <typename Called>
py::object vectorcall_type(const char* name) {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Called, call), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(Called::make)},
        {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
        {Py_tp_dealloc, reinterpret_cast<void*>(Called::dealloc)},
        {Py_tp_traverse, reinterpret_cast<void*>(Called::traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(Called::clear)},
        {Py_tp_members, members},
        {0, nullptr}};
    PyType_Spec spec = {
        name, sizeof(Called), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return owned(PyType_FromSpec(&spec));
}

}  // namespace vescale
