// Inputs of models in static mode that are plain tensors and constants: what decides about them, and this rank's parts.

#pragma once

#include "local_regions.h"
#include "thread_settings.h"

#include <cstring>
#include <string>

namespace vescale {

class InputsKey {
  public:
    // False: an input is of another kind.
    bool add_value(PyObject* value) {
        if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == THPVariableClass) {
            return add_tensor(THPVariable_Unpack(value));
        }
        if (value == Py_None || PyBool_Check(value)) {
            bytes_ += value == Py_None ? 'n' : value == Py_True ? 'y' : 'f';
            return true;
        }
        if (PyLong_CheckExact(value)) {
            int overflow = 0;
            bytes_ += 'i';
            add_number(PyLong_AsLongLongAndOverflow(value, &overflow));
            return overflow == 0;
        }
        if (PyFloat_CheckExact(value)) {
            std::int64_t bits = 0;
            const double number = PyFloat_AS_DOUBLE(value);
            std::memcpy(&bits, &number, sizeof(bits));
            bytes_ += 'd';
            add_number(bits);
            return true;
        }
        return PyUnicode_CheckExact(value) && add_text(value);
    }

    bool add_text(PyObject* text) {
        Py_ssize_t length = 0;
        const char* characters = PyUnicode_AsUTF8AndSize(text, &length);
        if (characters == nullptr) {
            PyErr_Clear();
            return false;
        }
        bytes_ += 's';
        add_number(length);
        bytes_.append(characters, length);
        return true;
    }

    void add_number(std::int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

    py::bytes get() const { return py::bytes(bytes_); }

  private:
    bool add_tensor(const at::Tensor& tensor) {
        const bool is_other = tensor.requires_grad() || tensor.layout() != at::kStrided || tensor.is_inference() ||
            tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
        if (is_other) {
            return false;
        }
        bytes_ += 't';
        add_number(static_cast<std::int64_t>(tensor.scalar_type()));
        add_number(static_cast<std::int64_t>(tensor.device().type()));
        add_number(tensor.device().index());
        add_number(tensor.dim());
        for (const auto size : tensor.sizes()) {
            add_number(size);
        }
        return true;
    }

    std::string bytes_;
};

// Settings of the thread, and of inputs: shapes, dtypes and devices of tensors without gradients, and values of constants. None:
// some are of other kinds.
inline py::object inputs_key(const py::tuple& args, const py::dict& kwargs) {
    InputsKey key;
    for (const auto number : thread_setting_numbers()) {
        key.add_number(number);
    }
    for (const auto value : args) {
        if (!key.add_value(value.ptr())) {
            return py::none();
        }
    }
    key.add_number(-1);
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(kwargs.ptr(), &at, &name, &value) != 0;) {
        if (!key.add_text(name) || !key.add_value(value)) {
            return py::none();
        }
    }
    return key.get();
}

// The local tensor of `wrap_global`, for tensors without gradients; None where Python has to.
inline py::object local_part(const at::Tensor& tensor, py::handle mesh, py::handle placements) {
    if (is_unusual(tensor) || is_linked(tensor)) {
        return py::none();
    }
    const Running running;
    const auto local = part_of_global(tensor, mesh, placements).second;
    if (!local.defined()) {
        return py::none();
    }
    give_own_version(local, tensor);
    return to_object(local);
}

}  // namespace vescale
