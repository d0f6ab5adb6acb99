// Entries of dictionaries, which modules keep their attributes in: compared with what they were, and shown for a while.
//
// The lists are Python's, so that its garbage collector sees what they hold. Those of one call have one length; a comparison may
// run Python, so that what is compared is held meanwhile.

#pragma once

#include "dtensor.h"

namespace vescale {

inline Py_ssize_t length_of(const py::list& list) {
    return PyList_GET_SIZE(list.ptr());
}

inline PyObject* at(const py::list& list, Py_ssize_t index) {
    TORCH_CHECK_VALUE(index < length_of(list), "lists of different lengths");
    return PyList_GET_ITEM(list.ptr(), index);
}

inline PyObject* dict_at(const py::list& dicts, Py_ssize_t index) {
    PyObject* dict = at(dicts, index);
    TORCH_CHECK_TYPE(PyDict_Check(dict), "expected a dictionary");
    return dict;
}

// The first dictionary whose number of entries is another one; -1: there is none.
inline Py_ssize_t first_resized(const py::list& dicts, const py::list& sizes) {
    for (Py_ssize_t i = 0; i < length_of(dicts); ++i) {
        if (PyDict_Size(dict_at(dicts, i)) != py::handle(at(sizes, i)).cast<Py_ssize_t>()) {
            return i;
        }
    }
    return -1;
}

// The first entry that is missing or another object; -1: there is none.
inline Py_ssize_t first_changed(const py::list& dicts, const py::list& keys, const py::list& values) {
    for (Py_ssize_t i = 0; i < length_of(dicts); ++i) {
        PyObject* found = PyDict_GetItemWithError(dict_at(dicts, i), at(keys, i));
        if (found == nullptr && PyErr_Occurred()) {
            throw python_error();
        }
        if (found != at(values, i)) {
            return i;
        }
    }
    return -1;
}

inline void set_entries(const py::list& dicts, const py::list& keys, const py::list& values) {
    for (Py_ssize_t i = 0; i < length_of(dicts); ++i) {
        if (PyDict_SetItem(dict_at(dicts, i), at(keys, i), at(values, i)) < 0) {
            throw python_error();
        }
    }
}

// Those that are missing stay so.
inline void delete_entries(const py::list& dicts, const py::list& keys) {
    for (Py_ssize_t i = 0; i < length_of(dicts); ++i) {
        if (PyDict_DelItem(dict_at(dicts, i), at(keys, i)) < 0) {
            if (!PyErr_ExceptionMatches(PyExc_KeyError)) {
                throw python_error();
            }
            PyErr_Clear();
        }
    }
}

// The first tensor of which `requires_grad` is another one than this; -1: there is none.
inline Py_ssize_t first_other_flag(const py::list& tensors, const py::list& requires_grad) {
    for (Py_ssize_t i = 0; i < length_of(tensors); ++i) {
        PyObject* tensor = at(tensors, i);
        if (tensor_of(tensor).requires_grad() != (at(requires_grad, i) == Py_True)) {
            return i;
        }
    }
    return -1;
}

// Whether each DTensor has the local tensor that it had, at the address where its memory was.
inline bool have_locals(const py::list& dtensors, const py::list& locals, const py::list& addresses) {
    if (dtensor_class().type == nullptr) {
        return false;
    }
    for (Py_ssize_t i = 0; i < length_of(dtensors); ++i) {
        if (!THPVariable_Check(at(dtensors, i))) {
            return false;
        }
        PyObject* dtensor = dtensor_of(THPVariable_Unpack(at(dtensors, i)));
        if (dtensor == nullptr || slot(dtensor, dtensor_class().local_slot) != at(locals, i)) {
            return false;
        }
        const auto address = reinterpret_cast<std::uintptr_t>(local_of(dtensor).data_ptr());
        if (address != py::handle(at(addresses, i)).cast<std::uintptr_t>()) {
            return false;
        }
    }
    return true;
}

}  // namespace vescale
