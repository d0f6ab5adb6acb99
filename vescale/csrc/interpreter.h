// The interpreter's lock, and new references to Python objects.

#pragma once

#include <torch/csrc/python_headers.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace vescale {

// The interpreter's lock, taken for a scope. Where this thread has it, as most do, only that is found out.
class Gil {
  public:
    Gil() : was_held_(is_held()) {
        if (!was_held_) {
            state_ = PyGILState_Ensure();
        }
    }
    ~Gil() {
        if (!was_held_) {
            PyGILState_Release(state_);
        }
    }
    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

  private:
    static bool is_held() {  // PyGILState_Check answers yes where there are several interpreters
#if PY_VERSION_HEX >= 0x030D0000
        PyThreadState* current = PyThreadState_GetUnchecked();
#else
        PyThreadState* current = _PyThreadState_UncheckedGet();
#endif
        return current != nullptr && current == PyGILState_GetThisThreadState();
    }

    bool was_held_;
    PyGILState_STATE state_{};
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
