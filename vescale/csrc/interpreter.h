// References to Python objects, and the interpreter's lock.

#pragma once

#include <torch/csrc/python_headers.h>

#include <utility>

namespace vescale {

// A reference to a Python object. Made, copied and dropped with the interpreter's lock held.
class PyRef {
  public:
    PyRef() = default;
    static PyRef steal(PyObject* object) {
        PyRef made;
        made.object_ = object;
        return made;
    }
    static PyRef borrow(PyObject* object) {
        Py_XINCREF(object);
        return steal(object);
    }
    PyRef(const PyRef& other) : object_(other.object_) { Py_XINCREF(object_); }
    PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    PyRef& operator=(PyRef other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~PyRef() { Py_XDECREF(object_); }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_ = nullptr;
};

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

}  // namespace vescale
