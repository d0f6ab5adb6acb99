// The interpreter's lock, and new references to Python objects.

#pragma once

#include <torch/csrc/python_headers.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace vescale {

// The interpreter's lock, taken for a scope.
class Gil {
  public:
    Gil() : state_(PyGILState_Ensure()) {}
    ~Gil() { PyGILState_Release(state_); }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

  private:
    PyGILState_STATE state_;
};

// The interpreter's lock, given up for a scope if `is_wanted`.
class Unlocked {
  public:
    explicit Unlocked(bool is_wanted) : state_(is_wanted ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr) {
            PyEval_RestoreThread(state_);
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

// Owns a reference that a function of Python's C interface has returned. Throws the Python error if it is null.
inline py::object owned(PyObject* made) {
    if (made == nullptr) {
        throw python_error();
    }
    return py::reinterpret_steal<py::object>(made);
}

}  // namespace vescale
